// Quantised matrices: weights in blocks of 32 along the depth with one scale each, multiplied by activations that
// are quantised to 8 bits in groups of the same 32. One scale a row would not do: a few activations of a
// transformer are a hundred times the others, and would leave nothing of these.
//
// Every format is w = scale * (u - offset) + least with u unsigned, so that u is the unsigned operand of a dot
// product of bytes, and the offset goes into the sum as a whole number: -offset * (sum of the group's activations).
// Of IQ4_NL and MXFP4 a code is the place of u in a table of sixteen.
#pragma once

#include <cstdint>
#include <cstring>

#include "abi.h"
#include "bf16.h"

namespace diptych {

constexpr int kGroup = 32;  // along the depth
constexpr int kStrip = 16;  // columns that share a line; a block of kColumns holds two strips
static_assert(kDepth % kGroup == 0 && kColumns == 2 * kStrip);

// 32 activations: scale * (values + rest / 256), where a group that is not fine has no rest.
struct Group {
    int8_t values[kGroup];  // -127 .. 127
    int8_t rest[kGroup];    // likewise
    float scale;            // NaN where an activation was not finite
    float scaled_sum;       // of all activations: what a block's least value is multiplied with
    int32_t fine;           // 0 or 1
    int32_t minus_8_values, minus_8_rest;      // -8 * their sums: the offset of Q4_0
    int32_t minus_128_values, minus_128_rest;  // the offset of Q8_0 and of tables
    int32_t listed;  // of the row's n-th group: which is its n-th fine one; -1 after the last, for not all can be
    int32_t half_values[2], half_rest[2];  // sums of each 16: for scales of 16 numbers
};
static_assert(sizeof(Group) == 112);

// A block of columns in memory, aligned to 64 bytes, read from first to last: group after group, each
//   lines of 64 bytes, [32 scales], for Q4_1 [32 least values], these fp16; scales of MXFP4, powers of two, bf16.
// A line holds four values of the depth for each of the 16 columns of a strip; those of the two strips take turns, so
// that a kernel reads them as they lie (in another order a core fetches half as fast):
//   Q8_0           8 lines: line i holds 4i .. 4i + 3, plus 128
//   the others     4 lines: line i holds 8i .. 8i + 3 in the low halves of its bytes, 8i + 4 .. 8i + 7 in the high
constexpr int kLine = 64;
constexpr int kNextLine = 2 * kLine;  // of the same strip

static constexpr int lines(int32_t format) { return format == DIPTYCH_Q8_0 ? 8 : 4; }

static constexpr int group_bytes(int32_t format) {
    return (2 * lines(format) + (format == DIPTYCH_Q4_1 ? 2 : 1)) * kLine;
}

// Where one strip of a group has its parts.
struct GroupOfStrip {
    const uint8_t *lines;
    const uint16_t *scales, *least;
};

static inline GroupOfStrip strip_of(const uint8_t *group, int32_t format, int64_t strip) {
    const auto *scales = reinterpret_cast<const uint16_t *>(group + 2 * lines(format) * kLine) + strip * kStrip;
    return {group + strip * kLine, scales, scales + kColumns};
}

constexpr bool has_table(int32_t format) { return format == DIPTYCH_IQ4_NL || format == DIPTYCH_MXFP4; }

// The table of IQ4 plus 128, so that it is unsigned.
alignas(16) constexpr uint8_t kTable[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                            129, 141, 153, 166, 181, 197, 217, 241};
// Twice the numbers of E2M1, plus 128.
alignas(16) constexpr uint8_t kTableOfE2m1[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                                  128, 127, 126, 125, 124, 122, 120, 116};

constexpr const uint8_t *table_of(int32_t format) { return format == DIPTYCH_MXFP4 ? kTableOfE2m1 : kTable; }

// IEEE half precision, subnormal numbers included.
static inline float half_to_float(uint16_t half) {
    uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = half & 0x7fffu;
    uint32_t bits;
    float value;
    if (rest >= 0x7c00u) {
        bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    bits = rest << 13;
    std::memcpy(&value, &bits, sizeof value);
    value *= 5.192296858534828e33f;  // 2^112: the difference of the exponents' biases, exact for subnormal ones too
    return sign != 0 ? -value : value;
}

// A scale as it is packed.
static inline float scale_to_float(int32_t format, uint16_t bits) {
    return format == DIPTYCH_MXFP4 ? to_float(bf16{bits}) : half_to_float(bits);
}

}  // namespace diptych
