// Registers of 8 floats (AVX2 and FMA).
#pragma once

#include <immintrin.h>

#include <limits>

#include "bf16.h"

namespace diptych {
namespace {

constexpr int kLanes = 8;
constexpr int kGemmRows = 3;  // of 32 columns: 12 sums and what feeds them in 16 registers
constexpr int kSums = 12;  // that attention keeps beside each other

using Lanes = __m256;

inline __m256i numbered() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline __m256i first(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), numbered()); }

inline Lanes splat(float x) { return _mm256_set1_ps(x); }
inline Lanes load(const float *p) { return _mm256_loadu_ps(p); }
inline Lanes load_part(const float *p, int n) { return _mm256_maskload_ps(p, first(n)); }
inline void store(float *p, Lanes v) { _mm256_storeu_ps(p, v); }
inline void store_part(float *p, Lanes v, int n) { _mm256_maskstore_ps(p, first(n), v); }

inline Lanes load(const bf16 *p) {
    __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Lanes load_part(const bf16 *p, int n) {
    bf16 whole[kLanes] = {};
    std::memcpy(whole, p, static_cast<size_t>(n) * sizeof(bf16));
    return load(whole);
}
inline void store_part(bf16 *p, Lanes v, int n) {
    float whole[kLanes];
    store(whole, v);
    for (int i = 0; i < n; i++) p[i] = to_bf16(whole[i]);
}
inline void store(bf16 *p, Lanes v) { store_part(p, v, kLanes); }

inline Lanes load(const int8_t *p) {
    __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
}
inline Lanes load_part(const int8_t *p, int n) {
    int8_t whole[kLanes] = {};
    std::memcpy(whole, p, static_cast<size_t>(n));
    return load(whole);
}
// Whole numbers of -127 .. 127.
inline void store_part(int8_t *p, Lanes v, int n) {
    float whole[kLanes];
    store(whole, v);
    for (int i = 0; i < n; i++) p[i] = static_cast<int8_t>(whole[i]);
}
inline void store(int8_t *p, Lanes v) { store_part(p, v, kLanes); }

inline __m256i load_pairs(const bf16 *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
inline Lanes load_even(const bf16 *p) { return _mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p), 16)); }
inline Lanes load_odd(const bf16 *p) {
    __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm256_castsi256_ps(_mm256_and_si256(load_pairs(p), high));
}

// Numbers 0, 2, .. and 1, 3, .. of 16 put in order.
inline void interleave(Lanes &even, Lanes &odd) {
    Lanes low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    even = _mm256_permute2f128_ps(low, high, 0x20);
    odd = _mm256_permute2f128_ps(low, high, 0x31);
}

inline Lanes add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm256_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm256_div_ps(a, b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
// The second operand where either is NaN.
inline Lanes max(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
inline Lanes min(Lanes a, Lanes b) { return _mm256_min_ps(a, b); }
inline Lanes round(Lanes a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// n is whole and from -126 to 127.
inline Lanes times_power_of_two(Lanes a, Lanes n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Lanes zero_where_below(Lanes v, Lanes x, float limit) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_LT_OQ), v);
}
// `yes` where x is below `limit`, else `no`, also where x is NaN.
inline Lanes where_below(Lanes x, float limit, Lanes yes, Lanes no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_LT_OQ));
}
// Lane i + lane i + 4, and so on by halves.
inline float sum_of(Lanes v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// NaN if any lane is.
inline float max_of(Lanes v) {
    if (_mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) != 0) return std::numeric_limits<float>::quiet_NaN();
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
// `outside` in all lanes but begin .. end-1.
inline Lanes keep_range(Lanes v, int begin, int end, float outside) {
    __m256i inside = _mm256_andnot_si256(first(begin), first(end));
    return _mm256_blendv_ps(_mm256_set1_ps(outside), v, _mm256_castsi256_ps(inside));
}

// The same four bytes in every lane of 32 bits.
inline __m256i same_four(const int8_t *p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
}

}  // namespace
}  // namespace diptych
