// Numbers in memory: bfloat16 and the paddings that all instruction sets share.
#pragma once

#include <cstdint>
#include <cstring>

namespace diptych {

struct bf16 {
    uint16_t bits;
};

// Packed weights come in blocks of 32 output columns (one AVX-512 kernel holds two registers of them, two AMX
// tiles the same) and K padded to 32 (one AMX tile row of bf16). Padding is zero and adds exactly nothing.
constexpr int kColumns = 32;
constexpr int kDepth = 32;
// Rows of activation buffers are padded to what an AMX kernel reads at once.
constexpr int kRowPadding = 32;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

static inline float to_float(bf16 value) {
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

static inline float to_float(float value) { return value; }

// Rounds to nearest even, keeps NaN a NaN.
static inline bf16 to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
    bits += 0x7fffu + ((bits >> 16) & 1u);
    return {static_cast<uint16_t>(bits >> 16)};
}

}  // namespace diptych
