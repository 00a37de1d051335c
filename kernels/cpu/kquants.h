// K-quants and IQ4: 256 numbers of a row share an fp16 scale (and an fp16 scale of least values), every 32 or 16 of them
// a whole number that this is multiplied with. The codes of the file are kept, bit for bit, in another order.
//
// Formats: ggml-common.h of github.com/ggml-org/ggml. A number is d * scale * (code - offset) - dmin * least; of IQ4_XS
// the code is a place in a table of sixteen.
#pragma once

#include "blocks.h"

namespace diptych {

constexpr int kSuper = 256;                    // numbers that share d
constexpr int kSuperGroups = kSuper / kGroup;  // groups of activations in them

struct KQuant {
    int low, high;  // bits of a code that lie together
    int part;       // numbers that share a scale: 16 or 32
    int offset;     // of a code
    bool least;     // whether there are least values
    bool table;     // whether a code is a place in the table
    int file_bytes; // of 256 numbers
};

constexpr KQuant kquant(int32_t format) {
    switch (format) {
        case DIPTYCH_Q2_K: return {2, 0, 16, 0, true, false, 84};
        case DIPTYCH_Q3_K: return {2, 1, 16, 4, false, false, 110};
        case DIPTYCH_Q4_K: return {4, 0, 32, 0, true, false, 144};
        case DIPTYCH_Q5_K: return {4, 1, 32, 0, true, false, 176};
        case DIPTYCH_Q6_K: return {4, 2, 16, 32, false, false, 210};
        default: return {4, 0, 32, 128, false, true, 136};  // IQ4_XS
    }
}

constexpr bool is_kquant(int32_t format) { return format >= DIPTYCH_Q2_K && format <= DIPTYCH_IQ4_XS; }

// A block of columns in memory, aligned to 64 bytes, read from first to last: for each 256 of the depth
//   32 fp16 d, of formats with least values 32 fp16 dmin,
//   then for each group of 32 of the depth lines of 64 bytes, the two strips by turns as in blocks.h:
//   low bits   4 lines as those of Q4_0, or of two bits 2: line i holds 16i + 4j .. 16i + 4j + 3 in the bits 2j of its bytes
//   high bits  2 lines alike, or of one bit 1: it holds 4j .. 4j + 3 in the bits j
//   and a line of scales: 32 of a part of 32, 32 least values; or 32 of the first part of 16, 32 of the second. Signed
//   where there are no least values; of Q2_K four bits of scale, then four of least value.
constexpr int low_lines(const KQuant &k) { return k.low; }
constexpr int high_lines(const KQuant &k) { return k.high; }
constexpr int kquant_head_bytes(const KQuant &k) { return (k.least ? 2 : 1) * kLine; }
constexpr int kquant_group_bytes(const KQuant &k) { return (2 * (low_lines(k) + high_lines(k)) + 1) * kLine; }
constexpr int kquant_bytes(const KQuant &k) { return kquant_head_bytes(k) + kSuperGroups * kquant_group_bytes(k); }

// Where the high bits of a strip begin, and the scales of a group.
constexpr int high_begin(const KQuant &k) { return low_lines(k) * kNextLine; }
constexpr int scales_begin(const KQuant &k) { return 2 * (low_lines(k) + high_lines(k)) * kLine; }

// A multiplier of d and one of dmin, of column `column` and part `part` (0 or 1) of a group.
struct Multipliers {
    int scale, least;
};

template <int Format>
inline Multipliers multipliers_at(const uint8_t *scales, int column, int part) {
    constexpr KQuant k = kquant(Format);
    if (Format == DIPTYCH_Q2_K) {
        uint8_t both = scales[part * kColumns + column];
        return {both & 15, both >> 4};
    }
    if (k.least) return {scales[column], scales[kColumns + column]};
    return {static_cast<int8_t>(scales[(k.part == 16 ? part : 0) * kColumns + column]), 0};
}

// Activations of a part, for a format's offset and least values.
inline int32_t half_sum(const Group &x, int part) { return part == 0 ? x.half_values[0] : x.half_values[1]; }

inline float scaled_half(const Group &x, int part) {
    int32_t sum = x.fine != 0 ? 256 * x.half_values[part] + x.half_rest[part] : x.half_values[part];
    return x.scale * (x.fine != 0 ? static_cast<float>(sum) / 256.0f : static_cast<float>(sum));
}

}  // namespace diptych
