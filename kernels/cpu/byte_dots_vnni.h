// Products with 8-bit weights in segments by vpdpbusd: 64 products of bytes an instruction, summed exactly in 32 bits.
#pragma once

#include <immintrin.h>

#include "bytes.h"
#include "gemm.h"

namespace diptych {
namespace {

constexpr int kByteRows = 12;  // of two strips: 24 dots, 2 weights and 1 activation in 32 registers
// Weights come from memory, and the hardware's own fetching stops at page borders. In bytes.
constexpr int kByteAhead = 8192;

[[gnu::always_inline]] inline __m512i strip_of_line(const uint8_t *line, int strip) {
    return _mm512_load_si512(line + strip * (kLineBytes / 2));
}

// to[Rows][32] = the low bytes of a segment times its weights, the offset included. A function of its own, which
// leaves its sums in memory: else the compiler finds more to keep in registers than there are.
template <int Rows>
[[gnu::noinline]] void low_dots(const Segment *x, const uint8_t *weight, int lines, int32_t *to) {
    __m512i dot[Rows][2];
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) dot[m][0] = dot[m][1] = _mm512_set1_epi32(x[m].minus_128_sum);
    for (int line = 0; line < lines; line++, weight += kLineBytes) {
        fetch<kByteAhead, 3>(weight);
        __m512i left = strip_of_line(weight, 0), right = strip_of_line(weight, 1);
#pragma GCC unroll 16
        for (int m = 0; m < Rows; m++) {
            __m512i same = same_four(x[m].values + kFour * line);
            dot[m][0] = _mm512_dpbusd_epi32(dot[m][0], left, same);
            dot[m][1] = _mm512_dpbusd_epi32(dot[m][1], right, same);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) {
        _mm512_store_si512(to + m * kColumns, dot[m][0]);
        _mm512_store_si512(to + m * kColumns + kLanes, dot[m][1]);
    }
}

inline void add_scaled(float *sums, __m512i dots, Lanes scale) {
    store(sums, fma(_mm512_cvtepi32_ps(dots), scale, load(sums)));
}

// out[Rows][32] += one segment of a panel of activations times its weights. The high bytes come after the low ones,
// which have brought the weights into the first cache.
template <int Rows>
inline void add_segment(const Segment *x, const uint8_t *weight, int lines, const float *scales, float *out) {
    alignas(64) int32_t low[Rows][kColumns];
    low_dots<Rows>(x, weight, lines, low[0]);
    Lanes left_scale = load(scales), right_scale = load(scales + kLanes);
    for (int m = 0; m < Rows; m++, out += kColumns) {
        __m512i left = _mm512_setzero_si512(), right = left;
#pragma GCC unroll 4
        for (int n = 0; n < kWide; n++) {
            const uint8_t *line = weight + x[m].wide[n] * kLineBytes;
            __m512i same = same_four(x[m].high[n]);
            left = _mm512_dpbusd_epi32(left, strip_of_line(line, 0), same);
            right = _mm512_dpbusd_epi32(right, strip_of_line(line, 1), same);
        }
        left = _mm512_add_epi32(_mm512_slli_epi32(left, 8), _mm512_load_si512(low[m]));
        right = _mm512_add_epi32(_mm512_slli_epi32(right, 8), _mm512_load_si512(low[m] + kLanes));
        Lanes scale = splat(x[m].scale);
        add_scaled(out, left, mul(left_scale, scale));
        add_scaled(out + kLanes, right, mul(right_scale, scale));
    }
}

}  // namespace
}  // namespace diptych
