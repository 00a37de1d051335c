// Lays K-quants and IQ4_XS out in the order in which the kernels read them (kquants.h). No bit of a code or of a scale is
// changed.
#include "kquants.h"
#include "pack.h"

namespace diptych {

namespace {

// Code of number e of a block of the file.
template <int Format>
int code_at(const uint8_t *block, int e) {
    int n = e / 128, l = e % 32, j = e % 128 / 32;
    if constexpr (Format == DIPTYCH_Q2_K) return block[16 + 32 * n + l] >> (2 * j) & 3;
    if constexpr (Format == DIPTYCH_Q3_K) {
        int high = block[l] >> (4 * n + j) & 1;
        return (block[32 + 32 * n + l] >> (2 * j) & 3) | high << 2;
    }
    if constexpr (Format == DIPTYCH_Q4_K || Format == DIPTYCH_Q5_K) {
        const uint8_t *low = block + (Format == DIPTYCH_Q4_K ? 16 : 48);
        uint8_t both = low[e / 64 * 32 + l];
        int code = e % 64 < 32 ? both & 15 : both >> 4;
        if constexpr (Format == DIPTYCH_Q5_K) code |= (block[16 + l] >> (e / 32) & 1) << 4;
        return code;
    }
    if constexpr (Format == DIPTYCH_Q6_K) {
        uint8_t both = block[64 * n + l + (j % 2) * 32];
        int low = j < 2 ? both & 15 : both >> 4;
        return low | (block[128 + 32 * n + l] >> (2 * j) & 3) << 4;
    }
    uint8_t both = block[8 + e / 32 * 16 + e % 16];
    return e % 32 < 16 ? both & 15 : both >> 4;
}

// The bytes that go into the line of scales, for part `part` of 16 or 32 numbers: scale, and least value where there is one.
template <int Format>
Multipliers file_multipliers(const uint8_t *block, int part) {
    if constexpr (Format == DIPTYCH_Q2_K) return {block[part], 0};
    if constexpr (Format == DIPTYCH_Q3_K) {
        const uint8_t *scales = block + 96;
        int low = part < 8 ? scales[part] & 15 : scales[part - 8] >> 4;
        int high = scales[8 + part % 4] >> (2 * (part / 4)) & 3;
        return {(low | high << 4) - 32, 0};
    }
    if constexpr (Format == DIPTYCH_Q4_K || Format == DIPTYCH_Q5_K) {
        const uint8_t *q = block + 4;
        if (part < 4) return {q[part] & 63, q[part + 4] & 63};
        return {(q[part + 4] & 15) | (q[part - 4] >> 6) << 4, q[part + 4] >> 4 | (q[part] >> 6) << 4};
    }
    if constexpr (Format == DIPTYCH_Q6_K) return {block[192 + part], 0};
    int high = (block[2] | block[3] << 8) >> (2 * part) & 3;
    int low = block[4 + part / 2] >> (4 * (part % 2)) & 15;
    return {(low | high << 4) - 32, 0};
}

constexpr int d_at(int32_t format) {
    return format == DIPTYCH_Q2_K ? 80 : format == DIPTYCH_Q3_K ? 108 : format == DIPTYCH_Q6_K ? 208 : 0;
}

template <int Format>
void place_codes(const uint8_t *block, int first, uint8_t *lines) {
    constexpr KQuant k = kquant(Format);
    for (int i = 0; i < kGroup; i++) {
        int code = code_at<Format>(block, first + i), four = i / 4;
        int low = code & ((1 << k.low) - 1), high = code >> k.low;
        int of_line = 8 / k.low;  // fours of the depth in a line
        uint8_t &to = lines[four / of_line * kNextLine + i % 4];
        to = static_cast<uint8_t>(to | low << (k.low * (four % of_line)));
        if constexpr (k.high > 0) {
            int of_high = 8 / k.high;
            uint8_t &also = lines[high_begin(k) + four / of_high * kNextLine + i % 4];
            also = static_cast<uint8_t>(also | high << (k.high * (four % of_high)));
        }
    }
}

// `row` of the file into `column` of its packed matrix.
template <int Format>
void place_row(uint8_t *block, int32_t depth, const uint8_t *row, int64_t column) {
    constexpr KQuant k = kquant(Format);
    int64_t within = column % kColumns, strip = within / kStrip, lane = within % kStrip;
    for (int64_t s = 0; s < depth / kSuper; s++, row += k.file_bytes, block += kquant_bytes(k)) {
        std::memcpy(block + within * 2, row + d_at(Format), 2);
        if (k.least) std::memcpy(block + kLine + within * 2, row + d_at(Format) + 2, 2);
        uint8_t *group = block + kquant_head_bytes(k);
        for (int g = 0; g < kSuperGroups; g++, group += kquant_group_bytes(k)) {
            place_codes<Format>(row, g * kGroup, group + strip * kLine + lane * 4);
            uint8_t *scales = group + scales_begin(k) + within;
            constexpr int parts = kGroup / k.part;
            for (int part = 0; part < parts; part++) {
                Multipliers found = file_multipliers<Format>(row, g * parts + part);
                scales[part * kColumns] = static_cast<uint8_t>(found.scale);
                if (k.least && parts == 1) scales[kColumns] = static_cast<uint8_t>(found.least);
            }
        }
    }
}

template <int Format>
void place_rows(const PackedPart &to, const DiptychMatrix &part, const ColumnOf &column) {
    constexpr KQuant k = kquant(Format);
    int64_t row_bytes = to.depth / kSuper * k.file_bytes;
    const auto *from = static_cast<const uint8_t *>(part.data);
    for (int64_t row = 0; row < part.rows; row++) {
        int64_t at = column(row);
        place_row<Format>(static_cast<uint8_t *>(to.block(at / kColumns)), to.depth, from + row * row_bytes, at);
    }
}

}  // namespace

int64_t kquant_block_bytes(int32_t format, int64_t depth) { return depth / kSuper * kquant_bytes(kquant(format)); }

void pack_kquants(const PackedPart &to, const DiptychMatrix &part, const ColumnOf &column) {
    switch (part.format) {
        case DIPTYCH_Q2_K: return place_rows<DIPTYCH_Q2_K>(to, part, column);
        case DIPTYCH_Q3_K: return place_rows<DIPTYCH_Q3_K>(to, part, column);
        case DIPTYCH_Q4_K: return place_rows<DIPTYCH_Q4_K>(to, part, column);
        case DIPTYCH_Q5_K: return place_rows<DIPTYCH_Q5_K>(to, part, column);
        case DIPTYCH_Q6_K: return place_rows<DIPTYCH_Q6_K>(to, part, column);
        default: return place_rows<DIPTYCH_IQ4_XS>(to, part, column);
    }
}

}  // namespace diptych
