// Products with quantised blocks in plain C++, for machines without byte products of their own.
#pragma once

#include <cmath>

#include "blocks.h"
#include "gemm.h"

namespace diptych {
namespace {

constexpr int kBlockRows = 1;

// NaN if any is.
inline float peak_of_group(const float *x) {
    float peak = 0.0f;
    for (int i = 0; i < kGroup; i++) {
        float size = std::fabs(x[i]);
        peak = size > peak || size != size ? size : peak;
        if (peak != peak) break;
    }
    return peak;
}

// Gives the sums of each 16 values, and those of the rest where there is room for it.
inline void round_group(const float *x, float inverse, int8_t *values, int32_t (&sums)[2], int8_t *rest,
                        int32_t (&rest_sums)[2]) {
    sums[0] = sums[1] = 0;
    for (int i = 0; i < kGroup; i++) {
        float scaled = x[i] * inverse, whole = std::nearbyintf(scaled);
        values[i] = static_cast<int8_t>(whole);
        sums[i / 16] += values[i];
        if (rest == nullptr) continue;
        float more = std::nearbyintf((scaled - whole) * 256.0f);
        rest[i] = static_cast<int8_t>(more < -127.0f ? -127.0f : more > 127.0f ? 127.0f : more);
        rest_sums[i / 16] += rest[i];
    }
}

inline int32_t weight_at(int format, const uint8_t *line, int column, int k) {
    if (format == DIPTYCH_Q8_0) return line[k / 4 * kNextLine + column * 4 + k % 4];
    uint8_t both = line[k / 8 * kNextLine + column * 4 + k % 4];
    int code = k % 8 < 4 ? both & 15 : both >> 4;
    return has_table(format) ? table_of(format)[code] : code;
}

template <int Format>
inline void add_products(const Group &x, const GroupOfStrip &group, float *sum) {
    constexpr int32_t offset = Format == DIPTYCH_Q8_0 || has_table(Format) ? 128 : Format == DIPTYCH_Q4_0 ? 8 : 0;
    for (int c = 0; c < kStrip; c++) {
        int32_t dot = 0;
        for (int k = 0; k < kGroup; k++) {
            int32_t value = x.fine != 0 ? 256 * x.values[k] + x.rest[k] : x.values[k];
            dot += (weight_at(Format, group.lines, c, k) - offset) * value;
        }
        float scale = scale_to_float(Format, group.scales[c]) * (x.fine != 0 ? x.scale / 256.0f : x.scale);
        sum[c] = static_cast<float>(dot) * scale + sum[c];
        if (Format == DIPTYCH_Q4_1) sum[c] = half_to_float(group.least[c]) * x.scaled_sum + sum[c];
    }
}

// out[Rows][32] = a panel of activations x one block of columns
template <int Format, int Rows>
inline void multiply_block(const Group *panel, const uint8_t *weight, int groups, float *out) {
    std::memset(out, 0, sizeof(float) * Rows * kColumns);
    for (int g = 0; g < groups; g++, weight += group_bytes(Format), panel += kBlockRows) {
        for (int strip = 0; strip < 2; strip++) {
            GroupOfStrip group = strip_of(weight, Format, strip);
            for (int m = 0; m < Rows; m++) {
                add_products<Format>(panel[m], group, out + m * kColumns + strip * kStrip);
            }
        }
    }
}

}  // namespace
}  // namespace diptych
