// Activations to segments of whole numbers by AVX-512; byte_rows_plain.h says the same in plain loops.
#pragma once

#include <immintrin.h>

#include <limits>

#include "bytes.h"

namespace diptych {
namespace {

constexpr int kRegisterLines = kLanes / kFour;  // in one register of floats
constexpr int kQuad = 4;                        // registers whose lines' peaks fill one register
constexpr int kQuadLines = kQuad * kRegisterLines;
constexpr int kQuads = (kLines + kQuadLines - 1) / kQuadLines;

inline __m512i greatest_everywhere(__m512i v) {
    v = _mm512_max_epi32(v, _mm512_shuffle_i64x2(v, v, 0x4e));
    v = _mm512_max_epi32(v, _mm512_shuffle_i64x2(v, v, 0xb1));
    v = _mm512_max_epi32(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));
    return _mm512_max_epi32(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
}

// The peak of each of the four lines of a register, in each of its lanes. As whole numbers: sizes of floats are
// ordered as their bits are, NaN above all.
inline __m512i peaks_of_lines(const float *x) {
    __m512i size = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32(std::numeric_limits<int32_t>::max()));
    size = _mm512_max_epi32(size, _mm512_shuffle_epi32(size, _MM_PERM_BADC));
    return _mm512_max_epi32(size, _mm512_shuffle_epi32(size, _MM_PERM_CDAB));
}

// Peaks with their lines in the last seven bits: lane 4 g + r has line g of register r.
inline __m512i keys_of_quad(const float *x, int quad, int lines) {
    const __m512i within = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __mmask16 second = 0x2222, third = 0x4444, fourth = 0x8888;
    const float *at = x + quad * kQuad * kLanes;
    int registers = (lines - quad * kQuadLines) / kRegisterLines;
    __m512i none = _mm512_set1_epi32(-1), keys = none;
    if (registers > 0) keys = peaks_of_lines(at);
    keys = _mm512_mask_mov_epi32(keys, second, registers > 1 ? peaks_of_lines(at + kLanes) : none);
    keys = _mm512_mask_mov_epi32(keys, third, registers > 2 ? peaks_of_lines(at + 2 * kLanes) : none);
    keys = _mm512_mask_mov_epi32(keys, fourth, registers > 3 ? peaks_of_lines(at + 3 * kLanes) : none);
    __m512i line = _mm512_add_epi32(within, _mm512_set1_epi32(quad * kQuadLines));
    __mmask16 there = _mm512_cmpge_epi32_mask(keys, _mm512_setzero_si512());
    keys = _mm512_andnot_si512(_mm512_set1_epi32(kLineBits), keys);
    return _mm512_mask_or_epi32(none, there, keys, line);
}

inline WidestLines widest_lines(const float *x, int lines) {
    __m512i keys[kQuads];
#pragma GCC unroll 5
    for (int q = 0; q < kQuads; q++) keys[q] = keys_of_quad(x, q, lines);
    WidestLines found;
#pragma GCC unroll 5
    for (int n = 0; n <= kWide; n++) {
        __m512i best = keys[0];
#pragma GCC unroll 4
        for (int q = 1; q < kQuads; q++) best = _mm512_max_epi32(best, keys[q]);
        best = greatest_everywhere(best);
        found.keys[n] = _mm_cvtsi128_si32(_mm512_castsi512_si128(best));
#pragma GCC unroll 5
        for (int q = 0; q < kQuads; q++) {
            keys[q] = _mm512_mask_mov_epi32(keys[q], _mm512_cmpeq_epi32_mask(keys[q], best), _mm512_set1_epi32(-1));
        }
    }
    return found;
}

// Stores `lines` lines as bytes, the low ones of wider numbers, and returns the sum of all numbers.
inline int32_t round_lines(const float *x, int lines, float inverse, int8_t *to) {
    Lanes scale = splat(inverse);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < kFour * lines; i += kLanes) {
        __m512i whole = _mm512_cvtps_epi32(mul(load(x + i), scale));
        sum = _mm512_add_epi32(sum, whole);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i), _mm512_cvtepi32_epi8(whole));
    }
    return _mm512_reduce_add_epi32(sum);
}

// The high bytes of the four widest lines.
inline void round_high(const float *x, const WidestLines &widest, float inverse, Segment &to) {
    Lanes all = _mm512_castps128_ps512(_mm_loadu_ps(x + kFour * widest.line(0)));
    all = _mm512_insertf32x4(all, _mm_loadu_ps(x + kFour * widest.line(1)), 1);
    all = _mm512_insertf32x4(all, _mm_loadu_ps(x + kFour * widest.line(2)), 2);
    all = _mm512_insertf32x4(all, _mm_loadu_ps(x + kFour * widest.line(3)), 3);
    // What is left when the low byte, a signed one, is taken away.
    __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(mul(all, splat(inverse))), _mm512_set1_epi32(128));
    __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(whole, 8));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to.high), high);
    for (int n = 0; n < kWide; n++) to.wide[n] = static_cast<uint16_t>(widest.line(n) * kLineBytes);
}

}  // namespace
}  // namespace diptych
