#include "embedding.h"

#include <cstring>
#include <vector>

#include "blocks.h"
#include "kquants.h"
#include "model.h"

namespace diptych {

namespace {

template <class Number>
const Number *table_row(const DiptychModel &model, int32_t token) {
    return static_cast<const Number *>(model.embedding) + static_cast<int64_t>(token) * model.shape.hidden;
}

void read_dense(const Linear &head, int32_t dtype, int32_t column, float *to) {
    int64_t lane = column % kColumns;
    const void *block = head.block(column / kColumns);
    if (dtype == DIPTYCH_FP32) {
        const auto *from = static_cast<const float *>(block) + lane;
        for (int32_t k = 0; k < head.in; k++) to[k] = from[static_cast<int64_t>(k) * kColumns];
        return;
    }
    const auto *from = static_cast<const bf16 *>(block) + lane * 2;
    for (int32_t k = 0; k < head.in; k++) to[k] = to_float(from[static_cast<int64_t>(k / 2) * kColumns * 2 + k % 2]);
}

// Numbers of GGUF's blocks of 32, with the arithmetic of kernels/quantised_linear.py.
void read_blocks(const uint8_t *block, int32_t format, int32_t in, int32_t column, float *to) {
    int64_t strip = column % kColumns / kStrip, lane = column % kStrip;
    for (int32_t begin = 0; begin < in; begin += kGroup, block += group_bytes(format)) {
        GroupOfStrip group = strip_of(block, format, strip);
        float scale = scale_to_float(format, group.scales[lane]);
        float least = format == DIPTYCH_Q4_1 ? half_to_float(group.least[lane]) : 0.0f;
        const uint8_t *lines = group.lines + lane * 4;
        for (int k = 0; k < kGroup && begin + k < in; k++) {
            float value;
            if (format == DIPTYCH_Q8_0) {
                value = scale * static_cast<float>(static_cast<int>(lines[k / 4 * kNextLine + k % 4]) - 128);
            } else {
                uint8_t both = lines[k / 8 * kNextLine + k % 4];
                int code = k % 8 < 4 ? both & 15 : both >> 4;
                if (has_table(format)) code = static_cast<int>(table_of(format)[code]) - 128;
                value = scale * static_cast<float>(format == DIPTYCH_Q4_0 ? code - 8 : code);
                if (format == DIPTYCH_Q4_1) value += least;
            }
            to[begin + k] = value;
        }
    }
}

template <int Format>
int packed_code(const uint8_t *lines, int i) {
    constexpr KQuant k = kquant(Format);
    int four = i / 4, of_line = 8 / k.low;
    int code = lines[four / of_line * kNextLine + i % 4] >> (k.low * (four % of_line)) & ((1 << k.low) - 1);
    if constexpr (k.high > 0) {
        int of_high = 8 / k.high;
        int high = lines[high_begin(k) + four / of_high * kNextLine + i % 4] >> (k.high * (four % of_high));
        code |= (high & ((1 << k.high) - 1)) << k.low;
    }
    return code;
}

// Numbers of K-quants, with the arithmetic of kernels/kquants.py.
template <int Format>
void read_kquants(const uint8_t *block, int32_t in, int32_t column, float *to) {
    constexpr KQuant k = kquant(Format);
    int within = column % kColumns, strip = within / kStrip, lane = within % kStrip;
    for (int32_t s = 0; s < in / kSuper; s++, block += kquant_bytes(k)) {
        uint16_t half;
        std::memcpy(&half, block + within * 2, 2);
        float d = half_to_float(half), dmin = 0.0f;
        if (k.least) {
            std::memcpy(&half, block + kLine + within * 2, 2);
            dmin = half_to_float(half);
        }
        const uint8_t *group = block + kquant_head_bytes(k);
        for (int g = 0; g < kSuperGroups; g++, group += kquant_group_bytes(k)) {
            const uint8_t *lines = group + strip * kLine + lane * 4;
            for (int i = 0; i < kGroup; i++) {
                Multipliers of = multipliers_at<Format>(group + scales_begin(k), within, i / k.part);
                int code = packed_code<Format>(lines, i);
                int value = k.table ? static_cast<int>(kTable[code]) - 128 : code - k.offset;
                float number = (d * static_cast<float>(of.scale)) * static_cast<float>(value);
                if (k.least) number -= dmin * static_cast<float>(of.least);
                *to++ = number;
            }
        }
    }
}

void read_quantised(const Linear &head, int32_t column, float *to) {
    const Linear::Section &section = head.section(column / kColumns);
    const auto *block = static_cast<const uint8_t *>(section.data) +
                        (column / kColumns - section.first_block) * section.block_bytes;
    switch (section.format) {
        case DIPTYCH_Q2_K: return read_kquants<DIPTYCH_Q2_K>(block, head.in, column, to);
        case DIPTYCH_Q3_K: return read_kquants<DIPTYCH_Q3_K>(block, head.in, column, to);
        case DIPTYCH_Q4_K: return read_kquants<DIPTYCH_Q4_K>(block, head.in, column, to);
        case DIPTYCH_Q5_K: return read_kquants<DIPTYCH_Q5_K>(block, head.in, column, to);
        case DIPTYCH_Q6_K: return read_kquants<DIPTYCH_Q6_K>(block, head.in, column, to);
        case DIPTYCH_IQ4_XS: return read_kquants<DIPTYCH_IQ4_XS>(block, head.in, column, to);
        default: return read_blocks(block, section.format, head.in, column, to);
    }
}

void read_head(const DiptychModel &model, int32_t token, float *to) {
    if (model.shape.dtype != DIPTYCH_BLOCKS) return read_dense(model.head, model.shape.dtype, token, to);
    read_quantised(model.head, token, to);
    for (int32_t i = 0; i < model.shape.hidden; i++) to[i] = to_float(to_bf16(to[i]));
}

void read_table(const DiptychModel &model, int32_t token, float *to) {
    if (model.shape.dtype == DIPTYCH_FP32) {
        std::memcpy(to, table_row<float>(model, token), sizeof(float) * static_cast<size_t>(model.shape.hidden));
        return;
    }
    const bf16 *from = table_row<bf16>(model, token);
    for (int32_t i = 0; i < model.shape.hidden; i++) to[i] = to_float(from[i]);
}

}  // namespace

void read_embedding(const DiptychModel &model, int32_t token, float *to) {
    model.embedding == nullptr ? read_head(model, token, to) : read_table(model, token, to);
}

void embed_token(const DiptychModel &model, int32_t token, float *to) {
    read_embedding(model, token, to);
    for (int32_t i = 0; i < model.shape.hidden; i++) to[i] *= model.shape.embedding_scale;
}

bool head_has_embedding(const DiptychModel &model) {
    const DiptychShape &shape = model.shape;
    if (shape.dtype == DIPTYCH_BYTES || model.head.data == nullptr || model.embedding == nullptr) return false;
    std::vector<float> table(static_cast<size_t>(shape.hidden)), head(table);
    for (int32_t token = 0; token < shape.vocab; token++) {
        read_table(model, token, table.data());
        read_head(model, token, head.data());
        if (std::memcmp(table.data(), head.data(), table.size() * sizeof(float)) != 0) return false;
    }
    return true;
}

}  // namespace diptych
