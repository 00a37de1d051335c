// The outlier columns of a segment by AVX-512: sixteen lanes are sorted beside each other, then merged.
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

// Pairs of lanes that are compared in turn, the greater one to come first.
struct Network {
    int pairs[32][2] = {};
    int count = 0;

    constexpr void compare(int first, int second) {
        pairs[count][0] = first;
        pairs[count][1] = second;
        count++;
    }

    // Sorts `lanes` lanes (merge exchange by Batcher; Knuth, volume 3, 5.2.2, algorithm M).
    static constexpr Network sorting(int lanes) {
        Network network;
        int top = 1;
        while (2 * top < lanes) top *= 2;
        for (int p = top; p > 0; p /= 2) {
            for (int q = top, r = 0, d = p; d > 0; d = q > p ? q - p : 0, q /= 2, r = p) {
                for (int i = 0; i + d < lanes; i++) {
                    if ((i & p) == r) network.compare(i, i + d);
                }
            }
        }
        return network;
    }

    // Sorts up to eight that first fall and then rise (Batcher's bitonic merge; Knuth, volume 3, 5.3.4): of eight the
    // last ones, as though those before were greater than any.
    static constexpr Network merging(int lanes) {
        Network network;
        for (int d = 4; d > 0; d /= 2) {
            for (int i = 8 - lanes; i < 8; i++) {
                if ((i & d) == 0) network.compare(i - (8 - lanes), i + d - (8 - lanes));
            }
        }
        return network;
    }

    template <class Register>
    [[gnu::always_inline]] constexpr void operator()(Register *keys) const {
#pragma GCC unroll 32
        for (int i = 0; i < count; i++) {
            Register one = keys[pairs[i][0]], other = keys[pairs[i][1]];
            keys[pairs[i][0]] = greater(one, other);
            keys[pairs[i][1]] = less(one, other);
        }
    }
};

// Lanes of zeros and ones, lane i in bit i: whether they only fall; or fall, and then rise.
constexpr bool falls(unsigned ones, int lanes, bool may_rise_then) {
    bool rose = false;
    for (int i = 1; i < lanes; i++) {
        bool before = ones >> (i - 1) & 1, now = ones >> i & 1;
        if (before && !now && rose) return false;
        rose = rose || (!before && now);
    }
    return may_rise_then || !rose;
}

// What sorts all zeros and ones of a kind sorts all numbers of that kind (Knuth, volume 3, 5.3.4, theorem Z).
constexpr bool sorts(const Network &network, int lanes, bool falling_then_rising) {
    for (unsigned ones = 0; ones < 1u << lanes; ones++) {
        if (falling_then_rising && !falls(ones, lanes, true)) continue;
        unsigned now = ones;
        for (int i = 0; i < network.count; i++) {
            unsigned first = 1u << network.pairs[i][0], second = 1u << network.pairs[i][1];
            if ((now & (first | second)) == second) now ^= first | second;
        }
        if (!falls(now, lanes, false)) return false;
    }
    return true;
}

constexpr Network kSort = Network::sorting(kRanked);
constexpr Network kSortMore = Network::sorting(kQuads - kRanked);
constexpr Network kMerge = Network::merging(kRanked);
static_assert(kRanked <= 8 && kQuads > kRanked && kQuads <= 2 * kRanked);
static_assert(sorts(kSort, kRanked, false) && sorts(kSortMore, kQuads - kRanked, false));
static_assert(sorts(kMerge, kRanked, true));

// The greatest of twice as many, lane by lane: both halves are sorted, so that one of each pair from opposite ends is
// among them, and so is no other. What is left so falls and then rises.
template <class Register>
[[gnu::always_inline]] inline void merge(Register (&keys)[kRanked], const Register (&others)[kRanked]) {
#pragma GCC unroll 8
    for (int i = 0; i < kRanked; i++) keys[i] = greater(keys[i], others[kRanked - 1 - i]);
    kMerge(keys);
}

// By halves of what is left, until each lane of 128 bits has the greatest of all.
inline void merge_lanes(const __m512i (&keys)[kRanked], __m128i (&found)[kRanked]) {
    __m256i eight[kRanked], upper_eight[kRanked];
    __m128i others[kRanked];
    for (int i = 0; i < kRanked; i++) eight[i] = _mm512_castsi512_si256(keys[i]);
    for (int i = 0; i < kRanked; i++) upper_eight[i] = _mm512_extracti32x8_epi32(keys[i], 1);
    merge(eight, upper_eight);
    for (int i = 0; i < kRanked; i++) found[i] = _mm256_castsi256_si128(eight[i]);
    for (int i = 0; i < kRanked; i++) others[i] = _mm256_extracti128_si256(eight[i], 1);
    merge(found, others);
    for (int i = 0; i < kRanked; i++) others[i] = _mm_shuffle_epi32(found[i], _MM_SHUFFLE(1, 0, 3, 2));
    merge(found, others);
    for (int i = 0; i < kRanked; i++) others[i] = _mm_shuffle_epi32(found[i], _MM_SHUFFLE(2, 3, 0, 1));
    merge(found, others);
}

// 0 .. 15 by rows of four, transposed.
inline __m512i rows_as_columns() {
    return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
}

// Peaks with their lines in the last eight bits: lane 4 g + r has line g of register r, -1 where there is none. Whole
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

inline OutlierColumns find_outlier_columns(const float *x, int lines) {
    __m512i keys[kRanked], others[kRanked];
#pragma GCC unroll 8
    for (int q = 0; q < kRanked; q++) keys[q] = keys_of_quad(x, q, lines);
    kSort(keys);
    if (lines > kRanked * kQuadLines) {
#pragma GCC unroll 8
        for (int q = 0; q < kRanked; q++) others[q] = keys_of_quad(x, kRanked + q, lines);
        kSortMore(others);  // after which there are none
        merge(keys, others);
    }
    __m128i found[kRanked];
    merge_lanes(keys, found);
    OutlierColumns outliers;
#pragma GCC unroll 8
    for (int n = 0; n < kRanked; n++) outliers.keys[n] = _mm_cvtsi128_si32(found[n]);
    return outliers;
}

}  // namespace
}  // namespace diptych
