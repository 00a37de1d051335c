// Products with K-quants and IQ4 in plain C++.
#pragma once

#include "dot_plain.h"
#include "kquants.h"

namespace diptych {
namespace {

// Code of number k of a group, less its offset.
template <int Format>
inline int32_t code_at(const uint8_t *lines, int column, int number) {
    constexpr KQuant k = kquant(Format);
    int four = number / 4, byte = column * 4 + number % 4;
    constexpr int of_line = 8 / k.low;
    int code = lines[four / of_line * kNextLine + byte] >> (k.low * (four % of_line)) & ((1 << k.low) - 1);
    if constexpr (k.high > 0) {
        constexpr int of_high = 8 / k.high;
        uint8_t line = lines[high_begin(k) + four / of_high * kNextLine + byte];
        code |= (line >> (k.high * (four % of_high)) & ((1 << k.high) - 1)) << k.low;
    }
    return (k.table ? kTable[code] : code) - k.offset;
}

// As multiply_block, of a format with scales of scales.
template <int Format, int Rows>
inline void multiply_kquant(const Group *panel, const uint8_t *weight, int groups, float *out) {
    constexpr KQuant k = kquant(Format);
    static_assert(Rows == 1, "rows go one by one");
    std::memset(out, 0, sizeof(float) * kColumns);
    for (int s = 0; s < groups / kSuperGroups; s++, weight += kquant_bytes(k)) {
        const auto *halves = reinterpret_cast<const uint16_t *>(weight);
        for (int g = 0; g < kSuperGroups; g++, panel += kBlockRows) {
            const uint8_t *group = weight + kquant_head_bytes(k) + g * kquant_group_bytes(k);
            const Group &x = *panel;
            float step = x.fine != 0 ? x.scale / 256.0f : x.scale;
            for (int c = 0; c < kColumns; c++) {
                const uint8_t *lines = group + c / kStrip * kLine;
                for (int part = 0; part < kGroup / k.part; part++) {
                    int32_t dot = 0;
                    for (int i = part * k.part; i < (part + 1) * k.part; i++) {
                        int32_t value = x.fine != 0 ? 256 * x.values[i] + x.rest[i] : x.values[i];
                        dot += code_at<Format>(lines, c % kStrip, i) * value;
                    }
                    Multipliers by = multipliers_at<Format>(group + scales_begin(k), c, part);
                    float scale = half_to_float(halves[c]) * static_cast<float>(by.scale);
                    out[c] = static_cast<float>(dot) * (scale * step) + out[c];
                    if (!k.least) continue;
                    float scaled = k.part == 16 ? scaled_half(x, part) : x.scaled_sum;
                    out[c] -= half_to_float(halves[kColumns + c]) * static_cast<float>(by.least) * scaled;
                }
            }
        }
    }
}

}  // namespace
}  // namespace diptych
