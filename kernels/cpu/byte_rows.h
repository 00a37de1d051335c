// Activations to segments of whole numbers. Plain loops of fixed length without branches: the compiler makes of them
// what the instruction set has.
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

// The nearest whole number, ties to even, of -2^22 .. 2^22: beyond 2^23 floats are whole, and the sum is rounded so.
inline int32_t nearest(float x) {
    constexpr float beyond = 12582912.0f;  // 1.5 * 2^23
    return bits_of(x + beyond) - bits_of(beyond);
}

// The five lines with the greatest peaks, widest first. Sizes of floats are ordered as their bits are, NaN above all,
// so that a peak with its line in the last six bits is a number of its own.
struct WidestLines {
    int32_t keys[kWide + 1];

    int line(int n) const { return keys[n] & (kLines - 1); }
    float peak(int n) const { return float_of(keys[n] & ~(kLines - 1)); }
};

inline WidestLines widest_lines(const float *x, int lines) {
    constexpr int32_t size = std::numeric_limits<int32_t>::max();  // all bits but the sign
    auto greater = [](int32_t a, int32_t b) { return a > b ? a : b; };
    alignas(64) int32_t keys[kLines];
    for (int i = 0; i < kLines; i++) keys[i] = -1;
    for (int i = 0; i < lines; i++) {
        int32_t left = greater(bits_of(x[4 * i]) & size, bits_of(x[4 * i + 1]) & size);
        int32_t right = greater(bits_of(x[4 * i + 2]) & size, bits_of(x[4 * i + 3]) & size);
        keys[i] = (greater(left, right) & ~(kLines - 1)) | i;
    }
    WidestLines found;
    int32_t below = size;
    for (int32_t &widest : found.keys) {
        int32_t best = -1;
        for (int i = 0; i < kLines; i++) best = greater(best, keys[i] < below ? keys[i] : -1);
        widest = below = best;
    }
    return found;
}

// `lines` lines of x, each value round(x * 127 / top), ties to even; top is the peak of the fifth widest line, or what
// the widest needs to have its 16 bits. An infinity or a NaN gives the scale NaN: its row's products become NaN, and no
// other row's.
inline void quantise_segment(const float *x, int lines, Segment &to) {
    WidestLines widest = widest_lines(x, lines);
    float peak = widest.peak(0), fifth = widest.peak(kWide);
    if (!(peak <= std::numeric_limits<float>::max())) {
        std::memset(&to, 0, sizeof to);
        to.scale = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    float top = fifth > peak / 256.0f ? fifth : peak / 256.0f;
    float inverse = top > kLeastTop ? 127.0f / top : 0.0f;
    int32_t sum = 0;
    for (int i = 0; i < kFour * lines; i++) {
        int32_t whole = nearest(x[i] * inverse);
        to.values[i] = static_cast<int8_t>(whole);
        sum += whole;
    }
    for (int n = 0; n < kWide; n++) {
        int line = widest.line(n);
        to.wide[n] = static_cast<uint16_t>(line * kLineBytes);
        for (int i = 0; i < kFour; i++) {
            int32_t whole = nearest(x[kFour * line + i] * inverse);
            to.high[n][i] = static_cast<int8_t>((whole - static_cast<int8_t>(whole)) / 256);
        }
    }
    to.scale = top / 127.0f;
    to.minus_128_sum = -128 * sum;
}

}  // namespace
}  // namespace diptych
