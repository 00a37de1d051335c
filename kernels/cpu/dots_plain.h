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

// Returns the sum of the values, and gives that of the rest where there is room for it.
inline int32_t round_group(const float *x, float inverse, int8_t *values, int8_t *rest, int32_t &rest_sum) {
    int32_t sum = 0;
    for (int i = 0; i < kGroup; i++) {
        float scaled = x[i] * inverse, whole = std::nearbyintf(scaled);
        values[i] = static_cast<int8_t>(whole);
        sum += values[i];
        if (rest == nullptr) continue;
        float more = std::nearbyintf((scaled - whole) * 256.0f);
        rest[i] = static_cast<int8_t>(more < -127.0f ? -127.0f : more > 127.0f ? 127.0f : more);
        rest_sum += rest[i];
    }
    return sum;
}

inline int32_t weight_at(int format, const uint8_t *line, int column, int k) {
    if (format == DIPTYCH_Q8_0) return line[k / 4 * kLine + column * 4 + k % 4];
    uint8_t both = line[k / 8 * kLine + column * 4 + k % 4];
    return k % 8 < 4 ? both & 15 : both >> 4;
}

// out[row][0 .. 15] of rows of 32
template <int Format, int Rows>
inline void multiply_strip(const Group *input, int64_t stride, const uint8_t *strip, int groups, float *out) {
    float sum[Rows][kStrip] = {};
    for (int g = 0; g < groups; g++) {
        GroupOfStrip group = group_of(strip, Format, g);
        for (int m = 0; m < Rows; m++) {
            const Group &x = input[m * stride + g];
            for (int c = 0; c < kStrip; c++) {
                int32_t offset = Format == DIPTYCH_Q8_0 ? 128 : Format == DIPTYCH_Q4_0 ? 8 : 0, dot = 0;
                for (int k = 0; k < kGroup; k++) {
                    int32_t value = x.fine != 0 ? 256 * x.values[k] + x.rest[k] : x.values[k];
                    dot += (weight_at(Format, group.lines, c, k) - offset) * value;
                }
                float scale = half_to_float(group.scales[c]) * x.scale;
                sum[m][c] = static_cast<float>(dot) * scale + sum[m][c];
                if (Format == DIPTYCH_Q4_1) {
                    sum[m][c] = half_to_float(group.least[c]) * x.scaled_sum + sum[m][c];
                }
            }
        }
    }
    for (int m = 0; m < Rows; m++) std::memcpy(out + m * kColumns, sum[m], sizeof sum[m]);
}

}  // namespace
}  // namespace diptych
