// Activations to 8 bits in groups of 32, and to 16 where that matters.
//
// What a group's rounding costs grows with its peak, and the outliers of a transformer keep to a few groups of a
// row: giving those a second byte takes most of the error away and costs a fifth of the products.
#pragma once

#include <cmath>
#include <limits>

#include "blocks.h"

namespace diptych {
namespace {

// A group whose peak is above this times the mean peak of its row is fine.
constexpr float kFineAbove = 1.2f;
// Below this the reciprocal of a scale overflows; such a group is zero for every purpose.
constexpr float kLeastPeak = 1e-35f;

inline void close_group(Group &group, int32_t values, int32_t rest) {
    float sum = static_cast<float>(256 * values + rest);
    group.scaled_sum = group.scale * (group.fine != 0 ? sum / 256.0f : static_cast<float>(values));
    group.minus_8_values = -8 * values;
    group.minus_8_rest = -8 * rest;
    group.minus_128_values = -128 * values;
    group.minus_128_rest = -128 * rest;
}

inline void quantise_group(const float *x, float peak, bool fine, Group &to) {
    if (!(peak <= std::numeric_limits<float>::max())) {
        int32_t listed = to.listed;
        std::memset(&to, 0, sizeof to);
        to.listed = listed;
        to.scale = to.scaled_sum = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    float inverse = peak > kLeastPeak ? 127.0f / peak : 0.0f;
    to.fine = fine ? 1 : 0;
    to.scale = peak / 127.0f;
    to.half_rest[0] = to.half_rest[1] = 0;
    round_group(x, inverse, to.values, to.half_values, fine ? to.rest : nullptr, to.half_rest);
    close_group(to, to.half_values[0] + to.half_values[1], to.half_rest[0] + to.half_rest[1]);
}

// values = round(x * 127 / peak), ties to even; rest = round(256 * what that left over). A group with an infinity
// or a NaN has the scale NaN: its row's products become NaN, and no other row's. Groups go to every `step`-th place.
inline void quantise(const float *x, Group *to, int64_t step, int64_t groups) {
    float total = 0.0f;
    for (int64_t g = 0; g < groups; g++) total += to[g * step].scale = peak_of_group(x + g * kGroup);
    float limit = kFineAbove * (total / static_cast<float>(groups));
    int64_t listed = 0;
    for (int64_t g = 0; g < groups; g++) {
        float peak = to[g * step].scale;
        bool fine = peak > limit;  // false where either is NaN
        if (fine) to[listed++ * step].listed = static_cast<int32_t>(g);
        quantise_group(x + g * kGroup, peak, fine, to[g * step]);
    }
    if (listed < groups) to[listed * step].listed = -1;
}

}  // namespace
}  // namespace diptych
