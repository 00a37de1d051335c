// Products with quantised blocks by vpdpbusd: 64 products of bytes an instruction, summed exactly in 32 bits.
#pragma once

#include <immintrin.h>

#include "gemm.h"
#include "blocks.h"

namespace diptych {
namespace {

constexpr int kBlockRows = 12;
// Weights come from memory, and the hardware's own fetching stops at page borders. In bytes.
constexpr int kAhead = 4096;

// NaN if any is.
inline float peak_of_group(const float *x) {
    __m512 a = _mm512_abs_ps(load(x)), b = _mm512_abs_ps(load(x + kLanes));
    __mmask16 bad = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
    return bad != 0 ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(max(a, b));
}

// Stores 16 whole numbers as bytes and returns them.
inline __m512i store_bytes(Lanes whole, int8_t *to) {
    __m512i numbers = _mm512_cvtps_epi32(whole);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8(numbers));
    return numbers;
}

// Returns the sum of the values, and gives that of the rest where there is room for it.
inline int32_t round_group(const float *x, float inverse, int8_t *values, int8_t *rest, int32_t &rest_sum) {
    __m512i sum = _mm512_setzero_si512(), left = sum;
    for (int i = 0; i < kGroup; i += kLanes) {
        Lanes scaled = mul(load(x + i), splat(inverse)), whole = round(scaled);
        sum = _mm512_add_epi32(sum, store_bytes(whole, values + i));
        if (rest == nullptr) continue;
        Lanes more = max(splat(-127.0f), min(splat(127.0f), round(mul(sub(scaled, whole), splat(256.0f)))));
        left = _mm512_add_epi32(left, store_bytes(more, rest + i));
    }
    rest_sum = _mm512_reduce_add_epi32(left);
    return _mm512_reduce_add_epi32(sum);
}

inline Lanes load_halves(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

template <int Format>
inline void load_lines(const uint8_t *line, __m512i (&weights)[8]) {
    if constexpr (Format == DIPTYCH_Q8_0) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) weights[i] = _mm512_loadu_si512(line + i * kLine);
    } else {
        const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m512i both = _mm512_loadu_si512(line + i * kLine);
            weights[2 * i] = _mm512_and_si512(both, low);
            weights[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
    }
}

inline __m512i same_four(const int8_t *p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}

// sum[row] += one group's products
template <int Format, int Rows>
inline void add_group(const Group *input, int64_t stride, const GroupOfStrip &group, Lanes (&sum)[Rows]) {
    __m512i weights[8];
    load_lines<Format>(group.lines, weights);
    Lanes scale = load_halves(group.scales);
    Lanes least = Format == DIPTYCH_Q4_1 ? load_halves(group.least) : splat(0.0f);
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) {
        const Group &x = input[m * stride];
        __m512i dot = Format == DIPTYCH_Q4_1   ? _mm512_setzero_si512()
                      : Format == DIPTYCH_Q4_0 ? _mm512_set1_epi32(x.minus_8_values)
                                               : _mm512_set1_epi32(x.minus_128_values);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) dot = _mm512_dpbusd_epi32(dot, weights[i], same_four(x.values + 4 * i));
        if (x.fine != 0) {
            dot = _mm512_slli_epi32(dot, 8);
            if constexpr (Format == DIPTYCH_Q4_0) dot = _mm512_add_epi32(dot, _mm512_set1_epi32(x.minus_8_rest));
            if constexpr (Format == DIPTYCH_Q8_0) dot = _mm512_add_epi32(dot, _mm512_set1_epi32(x.minus_128_rest));
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) dot = _mm512_dpbusd_epi32(dot, weights[i], same_four(x.rest + 4 * i));
        }
        sum[m] = fma(_mm512_cvtepi32_ps(dot), mul(scale, splat(x.scale)), sum[m]);
        if constexpr (Format == DIPTYCH_Q4_1) sum[m] = fma(least, splat(x.scaled_sum), sum[m]);
    }
}

// out[row][0 .. 15] of rows of 32
template <int Format, int Rows>
inline void multiply_strip(const Group *input, int64_t stride, const uint8_t *strip, int groups, float *out) {
    Lanes sum[Rows];
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) sum[m] = splat(0.0f);
    int g = 0;
    for (; g + 2 <= groups; g += 2, strip += pair_bytes(Format)) {
        for (int line = 0; line < pair_bytes(Format); line += kLine) __builtin_prefetch(strip + kAhead + line, 0, 3);
        add_group<Format>(input + g, stride, group_of(strip, Format, 0), sum);
        add_group<Format>(input + g + 1, stride, group_of(strip, Format, 1), sum);
    }
    if (g < groups) add_group<Format>(input + g, stride, group_of(strip, Format, 0), sum);
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) store(out + m * kColumns, sum[m]);
}

}  // namespace
}  // namespace diptych
