// Keys and values in int8 with a scale for each token and head; the meaning is kernels/int8_cache.py.
//
// A key's scale multiplies its scores, a value's scale the weights of its token: both are numbers of a token, so that
// neither touches the products over a head. Numbers widen to float32 exactly.
#pragma once

#include <limits>

#include "kv_layout.h"
#include "vector_math.h"

namespace diptych {
namespace {

constexpr float kLargestCode = 127.0f;

// The greatest size of `n` numbers; NaN where one is not finite.
inline float finite_peak(const float *x, int n) {
    Lanes peak = splat(0.0f), nothing = splat(0.0f);
    auto see = [&](Lanes v) {
        peak = max(max(v, sub(splat(0.0f), v)), peak);
        nothing = fma(v, splat(0.0f), nothing);  // NaN from infinity or NaN on
    };
    by_lanes(n, [&](int i) { see(load(x + i)); }, [&](int i, int rest) { see(load_part(x + i, rest)); });
    return sum_of(nothing) == 0.0f ? max_of(peak) : std::numeric_limits<float>::quiet_NaN();
}

// Rounds a head to whole numbers of -127 .. 127 times the scale that is returned: a 127th of its peak. The scale is NaN
// where a number is not finite, so that what sees the token becomes NaN, and nothing else.
inline float round_head(float *x, int n) {
    float scale = finite_peak(x, n) / kLargestCode;
    if (!(scale > 0.0f)) {
        for (int i = 0; i < n; i++) x[i] = 0.0f;
        return scale;
    }
    auto rounded = [&](Lanes v) {
        return max(splat(-kLargestCode), min(splat(kLargestCode), round(div(v, splat(scale)))));
    };
    by_lanes(
        n, [&](int i) { store(x + i, rounded(load(x + i))); },
        [&](int i, int rest) { store_part(x + i, rounded(load_part(x + i, rest)), rest); });
    return scale;
}

// Keeps the scale of the token in `lane` behind one head's numbers; `head` is the length of both.
inline void store_scale(int8_t *numbers, int64_t head, int block_size, int lane, float scale) {
    std::memcpy(numbers + head - scale_bytes(block_size) + scale_bytes(lane), &scale, sizeof scale);
}

}  // namespace
}  // namespace diptych
