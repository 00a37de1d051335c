// Products with 8-bit weights in segments by vpmaddubsw, which adds pairs of products in 16 bits with saturation: kept
// exact by taking the size of the activation (128 at most) as the unsigned operand, and moving its sign to the weight:
// 2 x 128 x 127 = 32,512.
#pragma once

#include <immintrin.h>

#include "bytes.h"
#include "gemm.h"

namespace diptych {
namespace {

constexpr int kByteRows = 4;

// Four activations times four weights for each of 8 columns; weights without their offset.
inline __m256i dot_line(__m256i same, __m256i weight) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(same), _mm256_sign_epi8(weight, same));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

inline __m256i load_weights(const uint8_t *p) {
    return _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)), _mm256_set1_epi8(-128));
}

// The high bytes of a row's outlier columns times 256, for 8 columns.
inline __m256i high_dot(const Segment &x, const uint8_t *weight) {
    __m256i dot = _mm256_setzero_si256();
    for (int n = 0; n < kOutliers; n++) {
        dot = _mm256_add_epi32(dot, dot_line(same_four(x.high[n]), load_weights(weight + x.outliers[n])));
    }
    return _mm256_slli_epi32(dot, 8);
}

// out[Rows][32] += one segment of a panel of activations times its weights; = of the First one.
template <int Rows, bool First>
inline void add_segment(const Segment *x, const uint8_t *weight, int lines, const float *scales, float *out) {
    for (int column = 0; column < kColumns; column += kLanes) {
        const uint8_t *of_columns = weight + kFour * column;
        __m256i dot[Rows];
#pragma GCC unroll 4
        for (int m = 0; m < Rows; m++) dot[m] = _mm256_setzero_si256();
        for (int line = 0; line < lines; line++) {
            __m256i now = load_weights(of_columns + line * kLineBytes);
#pragma GCC unroll 4
            for (int m = 0; m < Rows; m++) {
                dot[m] = _mm256_add_epi32(dot[m], dot_line(same_four(x[m].values + kFour * line), now));
            }
        }
        Lanes scale = load(scales + column);
        for (int m = 0; m < Rows; m++) {
            dot[m] = _mm256_add_epi32(dot[m], high_dot(x[m], of_columns));
            float *to = out + m * kColumns + column;
            store(to, fma(_mm256_cvtepi32_ps(dot[m]), mul(scale, splat(x[m].scale)), First ? splat(0.0f) : load(to)));
        }
    }
}

}  // namespace
}  // namespace diptych
