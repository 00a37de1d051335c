// Lays weights out once, at load, in the order in which the kernels read them.
#include "kquants.h"
#include "pack.h"

namespace diptych {

namespace {

// Copies a row of a source matrix into its column of a packed block.
void place_fp32(const float *row, int32_t in, float *block, int64_t lane) {
    for (int32_t k = 0; k < in; k++) block[static_cast<int64_t>(k) * kColumns + lane] = row[k];
}

void place_bf16(const bf16 *row, int32_t in, bf16 *block, int64_t lane) {
    for (int32_t k = 0; k < in; k++) block[(static_cast<int64_t>(k / 2) * kColumns + lane) * 2 + k % 2] = row[k];
}

template <class Number, class Place>
void pack_dense(Linear &to, const DiptychMatrix &part, const ColumnOf &column_of, Place place) {
    for (int64_t row = 0; row < part.rows; row++) {
        int64_t column = column_of(row), lane = column % kColumns;
        place(static_cast<const Number *>(part.data) + row * to.in, to.in,
              static_cast<Number *>(to.data) + column / kColumns * kColumns * to.depth, lane);
    }
}

int64_t quantised_block_bytes(int32_t format, int64_t depth) {
    return is_kquant(format) ? kquant_block_bytes(format, depth) : packed_block_bytes(format, depth);
}

int64_t block_bytes(const Linear &matrix, int32_t dtype) {
    switch (dtype) {
        case DIPTYCH_FP32: return kColumns * matrix.depth * static_cast<int64_t>(sizeof(float));
        case DIPTYCH_BF16: return kColumns * matrix.depth * static_cast<int64_t>(sizeof(bf16));
        case DIPTYCH_BYTES: return byte_block_bytes(DIPTYCH_I8, matrix.depth);
        default: return quantised_block_bytes(matrix.format, matrix.depth);
    }
}

// Parts of another format than those before them begin a section of their own.
void lay_sections(Linear &to, WeightMemory &memory, const DiptychMatrix *parts, int32_t count, bool interleaved) {
    int64_t rows = 0;
    for (int32_t p = 0; p < count; rows += parts[p++].rows) {
        if (p > 0 && (interleaved || parts[p].format == parts[p - 1].format)) continue;
        Linear::Section &section = to.sections[to.section_count++];
        section.first_block = static_cast<int32_t>(rows / kColumns);
        section.format = parts[p].format;
        section.block_bytes = quantised_block_bytes(section.format, to.depth);
    }
    for (int32_t s = 0; s < to.section_count; s++) {
        int32_t end = s + 1 < to.section_count ? to.sections[s + 1].first_block : to.blocks;
        to.sections[s].data = memory.take((end - to.sections[s].first_block) * to.sections[s].block_bytes);
    }
    to.data = to.sections[0].data;
}

void pack_part(Linear &to, const DiptychMatrix &part, const ColumnOf &column) {
    const Linear::Section &section = to.section(column(0) / kColumns);
    PackedPart place{section.data, section.first_block, section.block_bytes, to.depth, section.format};
    is_kquant(part.format) ? pack_kquants(place, part, column) : pack_blocks(place, part, column);
}

}  // namespace

void pack(Linear &to, WeightMemory &memory, const DiptychMatrix *parts, int32_t count, bool interleaved, int32_t dtype,
          WeightMemory *codes) {
    to = Linear{};  // of one that is set again nothing stays
    int64_t rows = 0;
    bool biased = false;
    for (int32_t p = 0; p < count; p++) {
        rows += interleaved ? round_up(parts[p].rows, kGateColumns) : parts[p].rows;
        biased = biased || parts[p].bias != nullptr;
    }
    to.in = parts[0].columns;
    to.out = static_cast<int32_t>(rows);
    to.depth = static_cast<int32_t>(round_up(to.in, kDepth));
    to.blocks = static_cast<int32_t>(round_up(rows, kColumns) / kColumns);
    to.format = parts[0].format;
    to.block_bytes = block_bytes(to, dtype);
    if (dtype == DIPTYCH_BLOCKS) {
        lay_sections(to, memory, parts, count, interleaved);
    } else {
        to.data = memory.take(to.blocks * to.block_bytes);
    }
    if (codes != nullptr && to.format == DIPTYCH_I8_CODED) {
        to.code_block_bytes = byte_block_bytes(DIPTYCH_I8_CODED, to.depth);
        to.codes = codes->take(to.blocks * to.code_block_bytes);
    }
    void *bias = biased ? memory.take(static_cast<int64_t>(to.blocks) * kColumns * sizeof(float)) : nullptr;
    to.bias = static_cast<float *>(bias);
    ColumnOf column{0, 0, interleaved};
    for (; column.part < count; column.part++) {
        const DiptychMatrix &part = parts[column.part];
        switch (dtype) {
            case DIPTYCH_FP32: pack_dense<float>(to, part, column, place_fp32); break;
            case DIPTYCH_BF16: pack_dense<bf16>(to, part, column, place_bf16); break;
            case DIPTYCH_BYTES: pack_bytes(to, part, column); break;
            default: pack_part(to, part, column);
        }
        for (int64_t row = 0; part.bias != nullptr && row < part.rows; row++) to.bias[column(row)] = part.bias[row];
        column.rows_before += part.rows;
    }
}

}  // namespace diptych
