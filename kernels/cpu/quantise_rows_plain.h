// Quantisation of activations to segments of whole numbers, in plain loops of fixed length without branches: the compiler
// makes of them what the instruction set has.
#pragma once

#include <limits>

#include "bytes.h"

namespace diptych {
namespace {

// The nearest whole number, ties to even, of -2^22 .. 2^22: beyond 2^23 floats are whole, and the sum is rounded so.
inline int32_t nearest(float x) {
    constexpr float beyond = 12582912.0f;  // 1.5 * 2^23
    return bits_of(x + beyond) - bits_of(beyond);
}

inline OutlierColumns find_outlier_columns(const float *x, int lines) {
    constexpr int32_t size = std::numeric_limits<int32_t>::max();  // all bits but the sign
    auto greater = [](int32_t a, int32_t b) { return a > b ? a : b; };
    alignas(64) int32_t keys[kLines];
    for (int i = 0; i < kLines; i++) keys[i] = -1;
    for (int i = 0; i < lines; i++) {
        int32_t left = greater(bits_of(x[4 * i]) & size, bits_of(x[4 * i + 1]) & size);
        int32_t right = greater(bits_of(x[4 * i + 2]) & size, bits_of(x[4 * i + 3]) & size);
        keys[i] = (greater(left, right) & ~kLineBits) | i;
    }
    OutlierColumns found;
    int32_t below = size;
    for (int32_t &greatest : found.keys) {
        int32_t best = -1;
        for (int i = 0; i < kLines; i++) best = greater(best, keys[i] < below ? keys[i] : -1);
        greatest = below = best;
    }
    return found;
}

// Stores `lines` lines as bytes, the low ones of wider numbers, and returns the sum of all numbers.
inline int32_t round_lines(const float *x, int lines, float inverse, int8_t *to) {
    int32_t sum = 0;
    for (int i = 0; i < kFour * lines; i++) {
        int32_t whole = nearest(x[i] * inverse);
        to[i] = static_cast<int8_t>(whole);
        sum += whole;
    }
    return sum;
}

// Stores the high bytes of the outlier columns.
inline void round_high(const float *x, const OutlierColumns &outliers, float inverse, Segment &to) {
    for (int n = 0; n < kOutliers; n++) {
        int line = outliers.line(n);
        to.outliers[n] = static_cast<uint16_t>(line * kLineBytes);
        for (int i = 0; i < kFour; i++) {
            int32_t whole = nearest(x[kFour * line + i] * inverse);
            to.high[n][i] = static_cast<int8_t>((whole - static_cast<int8_t>(whole)) / 256);
        }
    }
}

}  // namespace
}  // namespace diptych
