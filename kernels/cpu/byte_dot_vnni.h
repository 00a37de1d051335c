// Products with 8-bit weights in segments by vpdpbusd: 64 products of bytes an instruction, summed exactly in 32 bits.
#pragma once

#include <immintrin.h>

#include "bytes.h"
#include "gemm.h"
#include "vnni.h"

namespace diptych {
namespace {

constexpr int kByteRows = 12;  // of two strips: 24 dots, 2 weights and 1 activation in 32 registers
constexpr int kByteAhead = 8192;

[[gnu::always_inline]] inline __m512i strip_of_line(const uint8_t *line, int strip) {
    return _mm512_load_si512(line + strip * (kLineBytes / 2));
}

// High byte n of four, everywhere.
template <int N>
inline __m512i same_high(__m512i all) {
    return _mm512_shuffle_epi32(all, static_cast<_MM_PERM_ENUM>(N * 0x55));
}

// dot += 256 times the high bytes' products. When a segment is through, its lines are in the first cache. What is short
// of here is loads: of the high bytes and of the places of their lines there is one each.
[[gnu::always_inline]] inline void add_high(const Segment &x, const uint8_t *weight, __m512i (&dot)[2]) {
    static_assert(kOutliers == 4 && sizeof x.high == sizeof(__m128i) && sizeof x.outliers == sizeof(uint64_t));
    __m512i more[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    __m512i high = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(x.high)));
    const __m512i same[kOutliers] = {same_high<0>(high), same_high<1>(high), same_high<2>(high), same_high<3>(high)};
    uint64_t wide;
    std::memcpy(&wide, x.outliers, sizeof wide);
#pragma GCC unroll 4
    for (int n = 0; n < kOutliers; n++) {
        const uint8_t *line = weight + static_cast<uint16_t>(wide >> (16 * n));
        add_dots(more[0], strip_of_line(line, 0), same[n]);
        add_dots(more[1], strip_of_line(line, 1), same[n]);
    }
    for (int i = 0; i < 2; i++) dot[i] = _mm512_add_epi32(dot[i], _mm512_slli_epi32(more[i], 8));
}

// sums = dots * scale, of the First segment; += of the others.
template <bool First>
[[gnu::always_inline]] inline void add_scaled(float *sums, __m512i dots, Lanes scale) {
    store(sums, fma(_mm512_cvtepi32_ps(dots), scale, First ? splat(0.0f) : load(sums)));
}

// out[Rows][32] += one segment of a panel of activations times its weights; = of the First one.
template <int Rows, bool First>
[[gnu::noinline]] void add_segment(const Segment *x, const uint8_t *weight, int lines, const float *scales,
                                   float *out) {
    constexpr bool kFetches = Rows > kFewRows;
    __m512i dot[Rows][2];
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) dot[m][0] = dot[m][1] = _mm512_set1_epi32(x[m].minus_128_sum);
    const uint8_t *at = weight;
    for (int line = 0; line < lines; line++, at += kLineBytes) {
        if (kFetches) fetch<kByteAhead, 2>(at);
        __m512i left = strip_of_line(at, 0), right = strip_of_line(at, 1);
#pragma GCC unroll 16
        for (int m = 0; m < Rows; m++) add_line(dot[m], left, right, m, x[m].values + kFour * line);
    }
    if (kFetches) fetch<kByteAhead, 2>(scales);  // two lines as any other
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) add_high(x[m], weight, dot[m]);
    Lanes left_scale = load(scales), right_scale = load(scales + kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++, out += kColumns) {
        Lanes scale = splat(x[m].scale);
        add_scaled<First>(out, dot[m][0], mul(left_scale, scale));
        add_scaled<First>(out + kLanes, dot[m][1], mul(right_scale, scale));
    }
}

}  // namespace
}  // namespace diptych
