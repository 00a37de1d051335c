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

inline __m512i greater(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
inline __m256i greater(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
inline __m128i greater(__m128i a, __m128i b) { return _mm_max_epi32(a, b); }
inline __m512i less(__m512i a, __m512i b) { return _mm512_min_epi32(a, b); }
inline __m256i less(__m256i a, __m256i b) { return _mm256_min_epi32(a, b); }
inline __m128i less(__m128i a, __m128i b) { return _mm_min_epi32(a, b); }

// Lane by lane, greatest first, by the shortest network that sorts five (Knuth, volume 3, 5.3.4).
template <class Register>
[[gnu::always_inline]] inline void sort_five(Register (&keys)[kWide + 1]) {
    static_assert(kWide + 1 == 5);
    constexpr int kNetwork[9][2] = {{0, 3}, {1, 4}, {0, 2}, {1, 3}, {0, 1}, {2, 4}, {1, 2}, {3, 4}, {2, 3}};
#pragma GCC unroll 9
    for (const auto &pair : kNetwork) {
        Register one = keys[pair[0]], other = keys[pair[1]];
        keys[pair[0]] = greater(one, other);
        keys[pair[1]] = less(one, other);
    }
}

// The five greatest of ten, lane by lane: both fives are sorted, so that one of each pair from opposite ends is among
// them, and so is no other.
template <class Register>
[[gnu::always_inline]] inline void merge_fives(Register (&keys)[kWide + 1], const Register (&others)[kWide + 1]) {
#pragma GCC unroll 5
    for (int i = 0; i <= kWide; i++) keys[i] = greater(keys[i], others[kWide - i]);
    sort_five(keys);
}

// By halves of what is left, until each lane of 128 bits has the five greatest of all.
inline void five_of_all(__m512i (&keys)[kWide + 1], __m128i (&found)[kWide + 1]) {
    __m256i eight[kWide + 1], upper_eight[kWide + 1];
    __m128i others[kWide + 1];
    sort_five(keys);
    for (int i = 0; i <= kWide; i++) eight[i] = _mm512_castsi512_si256(keys[i]);
    for (int i = 0; i <= kWide; i++) upper_eight[i] = _mm512_extracti32x8_epi32(keys[i], 1);
    merge_fives(eight, upper_eight);
    for (int i = 0; i <= kWide; i++) found[i] = _mm256_castsi256_si128(eight[i]);
    for (int i = 0; i <= kWide; i++) others[i] = _mm256_extracti128_si256(eight[i], 1);
    merge_fives(found, others);
    for (int i = 0; i <= kWide; i++) others[i] = _mm_shuffle_epi32(found[i], _MM_SHUFFLE(1, 0, 3, 2));
    merge_fives(found, others);
    for (int i = 0; i <= kWide; i++) others[i] = _mm_shuffle_epi32(found[i], _MM_SHUFFLE(2, 3, 0, 1));
    merge_fives(found, others);
}

// 0 .. 15 by rows of four, transposed.
inline __m512i rows_as_columns() {
    return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}

// Peaks with their lines in the last seven bits: lane 4 g + r has line g of register r, -1 where there is none. Whole
// numbers: sizes of floats are ordered as their bits are, NaN above all.
inline __m512i keys_of_quad(const float *x, int quad, int lines) {
    const __m512i size = _mm512_set1_epi32(std::numeric_limits<int32_t>::max() & ~kLineBits);
    int rest = lines - quad * kQuadLines;
    if (rest <= 0) return _mm512_set1_epi32(-1);
    __m512i sizes[kQuad];
#pragma GCC unroll 4
    for (int r = 0; r < kQuad; r++) {
        __mmask16 there = r * kRegisterLines < rest ? 0xffff : 0;  // `lines` is a multiple of a register's
        sizes[r] = _mm512_and_si512(size, _mm512_maskz_loadu_epi32(there, x + (quad * kQuad + r) * kLanes));
    }
    // Transposed in fours: of numbers 0 and 2 of each line and of 1 and 3 the greater ones, then of these.
    __m512i first = greater(_mm512_unpacklo_epi32(sizes[0], sizes[1]), _mm512_unpackhi_epi32(sizes[0], sizes[1]));
    __m512i last = greater(_mm512_unpacklo_epi32(sizes[2], sizes[3]), _mm512_unpackhi_epi32(sizes[2], sizes[3]));
    __m512i peaks = greater(_mm512_unpacklo_epi64(first, last), _mm512_unpackhi_epi64(first, last));
    __m512i line = _mm512_add_epi32(rows_as_columns(), _mm512_set1_epi32(quad * kQuadLines));
    __mmask16 there = _mm512_cmplt_epi32_mask(line, _mm512_set1_epi32(lines));
    return _mm512_mask_or_epi32(_mm512_set1_epi32(-1), there, peaks, line);
}

inline WidestLines widest_lines(const float *x, int lines) {
    static_assert(kQuads == kWide + 1);
    __m512i keys[kQuads];
#pragma GCC unroll 5
    for (int q = 0; q < kQuads; q++) keys[q] = keys_of_quad(x, q, lines);
    __m128i five[kWide + 1];
    five_of_all(keys, five);
    WidestLines found;
#pragma GCC unroll 5
    for (int n = 0; n <= kWide; n++) found.keys[n] = _mm_cvtsi128_si32(five[n]);
    return found;
}

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
