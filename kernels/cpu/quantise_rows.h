// Quantisation of activations to segments of whole numbers. What takes the time has a form of its own for AVX-512,
// with the same numbers.
#pragma once

#include <limits>

#include "bytes.h"

namespace diptych {
namespace {

// Below this the reciprocal of a scale overflows; such a segment is zero for every purpose.
constexpr float kLeastScaledPeak = 1e-35f;

inline int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

constexpr int kRanked = kOutliers + 1;  // the lines with 16 bits, and the one that the scale goes by

// The lines with the greatest peaks, greatest first. Sizes of floats are ordered as their bits are, NaN above all, so that
// a peak with its line in the last eight bits is a number of its own.
struct OutlierColumns {
    int32_t keys[kRanked];

    int line(int n) const { return keys[n] & kLineBits; }
    float peak(int n) const { return float_of(keys[n] & ~kLineBits); }
};

}  // namespace
}  // namespace diptych

#if defined(__AVX512F__)
#include "quantise_rows_avx512.h"
#else
#include "quantise_rows_plain.h"
#endif

namespace diptych {
namespace {

// Quantises `lines` lines of x, each value round(x * 127 / top), ties to even; top is the peak of the first line that is
// no outlier, or what the greatest needs to have its 16 bits. An infinity or a NaN gives the scale NaN: its row's
// products become NaN, and no other row's.
inline void quantise_segment(const float *x, int lines, Segment &to) {
    OutlierColumns outliers = find_outlier_columns(x, lines);
    float peak = outliers.peak(0), next = outliers.peak(kOutliers);
    if (!(peak <= std::numeric_limits<float>::max())) {
        std::memset(&to, 0, sizeof to);
        to.scale = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    float top = next > peak / 256.0f ? next : peak / 256.0f;
    float inverse = top > kLeastScaledPeak ? 127.0f / top : 0.0f;
    int32_t sum = round_lines(x, lines, inverse, to.values);
    round_high(x, outliers, inverse, to);
    to.scale = top / 127.0f;
    to.minus_128_sum = -128 * sum;
}

}  // namespace
}  // namespace diptych
