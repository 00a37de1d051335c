// Activations to 8 bits in groups of 32.
#pragma once

#include <cmath>
#include <limits>

#include "blocks.h"

namespace diptych {
namespace {

// Below this the reciprocal of a scale overflows; such a group is zero for every purpose.
constexpr float kLeastPeak = 1e-35f;

// values = round(x * 127 / peak), ties to even. A group with an infinity or a NaN has the scale NaN: its row's
// products become NaN, and no other row's.
inline void quantise(const float *x, Group *to, int64_t groups) {
    for (int64_t g = 0; g < groups; g++, x += kGroup, to++) {
        float peak = peak_of_group(x);
        bool finite = peak <= std::numeric_limits<float>::max();
        to->scale = finite ? peak / 127.0f : std::numeric_limits<float>::quiet_NaN();
        float inverse = finite && peak > kLeastPeak ? 127.0f / peak : 0.0f;
        int32_t sum = 0;
        if (finite) {
            sum = round_group(x, inverse, to->values);
        } else {
            std::memset(to->values, 0, kGroup);
        }
        to->scaled_sum = to->scale * static_cast<float>(sum);
        to->minus_8_sums = -8 * sum;
        to->minus_128_sums = -128 * sum;
    }
}

}  // namespace
}  // namespace diptych
