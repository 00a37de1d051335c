// Activations to segments of whole numbers. What takes the time has a form of its own for AVX-512, with the same
// numbers.
#pragma once

#include <limits>

#include "bytes.h"

namespace diptych {
namespace {

// Below this the reciprocal of a scale overflows; such a segment is zero for every purpose.
constexpr float kLeastTop = 1e-35f;

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

constexpr int kWidest = kWide + 1;  // the lines with 16 bits, and the one that the scale goes by

// The lines with the greatest peaks, widest first. Sizes of floats are ordered as their bits are, NaN above all, so that
// a peak with its line in the last eight bits is a number of its own.
struct WidestLines {
    int32_t keys[kWidest];

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

// `lines` lines of x, each value round(x * 127 / top), ties to even; top is the peak of the first line that is not wide,
// or what the widest needs to have its 16 bits. An infinity or a NaN gives the scale NaN: its row's products become NaN,
// and no other row's.
inline void quantise_segment(const float *x, int lines, Segment &to) {
    WidestLines widest = widest_lines(x, lines);
    float peak = widest.peak(0), next = widest.peak(kWide);
    if (!(peak <= std::numeric_limits<float>::max())) {
        std::memset(&to, 0, sizeof to);
        to.scale = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    float top = next > peak / 256.0f ? next : peak / 256.0f;
    float inverse = top > kLeastTop ? 127.0f / top : 0.0f;
    int32_t sum = round_lines(x, lines, inverse, to.values);
    round_high(x, widest, inverse, to);
    to.scale = top / 127.0f;
    to.minus_128_sum = -128 * sum;
}

}  // namespace
}  // namespace diptych
