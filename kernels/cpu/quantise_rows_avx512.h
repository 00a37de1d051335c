// Quantisation of activations to segments of whole numbers by AVX-512; the meaning is quantise_rows_plain.h.
#pragma once

#include <immintrin.h>

#include "bytes.h"
#include "outlier_columns_avx512.h"

namespace diptych {
namespace {

inline __m512i whole_numbers(const float *x, Lanes scale) { return _mm512_cvtps_epi32(mul(load(x), scale)); }

// Stores `lines` lines as bytes, the low ones of wider numbers, and returns the sum of all numbers, none of which has
// more than 16 bits. Packing keeps to lanes of 128 bits: there comes out a line of each register after the other.
inline int32_t round_lines(const float *x, int lines, float inverse, int8_t *to) {
    const __m512i ones = _mm512_set1_epi16(1), low = _mm512_set1_epi16(0xff);
    Lanes scale = splat(inverse);
    __m512i sum = _mm512_setzero_si512();
    int count = kFour * lines, i = 0;
    for (; i + kQuad * kLanes <= count; i += kQuad * kLanes) {
        __m512i first = _mm512_packs_epi32(whole_numbers(x + i, scale), whole_numbers(x + i + kLanes, scale));
        __m512i last =
            _mm512_packs_epi32(whole_numbers(x + i + 2 * kLanes, scale), whole_numbers(x + i + 3 * kLanes, scale));
        sum = _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_madd_epi16(first, ones), _mm512_madd_epi16(last, ones)));
        __m512i bytes = _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(last, low));
        _mm512_storeu_si512(to + i, _mm512_permutexvar_epi32(rows_as_columns(), bytes));
    }
    for (; i < count; i += kLanes) {
        __m512i whole = whole_numbers(x + i, scale);
        sum = _mm512_add_epi32(sum, whole);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i), _mm512_cvtepi32_epi8(whole));
    }
    return _mm512_reduce_add_epi32(sum);
}

// Stores the high bytes of the outlier columns.
inline void round_high(const float *x, const OutlierColumns &outliers, float inverse, Segment &to) {
    static_assert(kOutliers == 4);
    Lanes all = _mm512_castps128_ps512(_mm_loadu_ps(x + kFour * outliers.line(0)));
    all = _mm512_insertf32x4(all, _mm_loadu_ps(x + kFour * outliers.line(1)), 1);
    all = _mm512_insertf32x4(all, _mm_loadu_ps(x + kFour * outliers.line(2)), 2);
    all = _mm512_insertf32x4(all, _mm_loadu_ps(x + kFour * outliers.line(3)), 3);
    // What is left when the low byte, a signed one, is taken away.
    __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(mul(all, splat(inverse))), _mm512_set1_epi32(128));
    __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(whole, 8));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to.high), high);
    for (int n = 0; n < kOutliers; n++) to.outliers[n] = static_cast<uint16_t>(outliers.line(n) * kLineBytes);
}

}  // namespace
}  // namespace diptych
