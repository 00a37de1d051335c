// Registers of 16 floats (AVX-512 F, BW, DQ, VL). Included once by each file of that instruction set.
#pragma once

#include <immintrin.h>

#include <limits>

#include "bf16.h"

namespace diptych {
namespace {

constexpr int kLanes = 16;
constexpr int kGemmRows = 12;  // of 32 columns: 24 sums, 2 weights and 1 input in 32 registers
constexpr int kSums = 24;  // that attention keeps beside each other

using Lanes = __m512;

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Lanes splat(float x) { return _mm512_set1_ps(x); }
inline Lanes load(const float *p) { return _mm512_loadu_ps(p); }
inline Lanes load_part(const float *p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float *p, Lanes v) { _mm512_storeu_ps(p, v); }
inline void store_part(float *p, Lanes v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }

inline Lanes widen(__m256i v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
inline __m256i narrow(Lanes v) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    __m512i bits = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), rounded, quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
inline Lanes load(const bf16 *p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
inline Lanes load_part(const bf16 *p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
inline void store(bf16 *p, Lanes v) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), narrow(v)); }
inline void store_part(bf16 *p, Lanes v, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(v)); }

inline Lanes load(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
inline Lanes load_part(const int8_t *p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
}
// Whole numbers of -127 .. 127.
inline void store(int8_t *p, Lanes v) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline void store_part(int8_t *p, Lanes v, int n) {
    _mm512_mask_cvtepi32_storeu_epi8(p, first(n), _mm512_cvtps_epi32(v));
}

// 16 pairs of bf16: the even ones and the odd ones.
inline Lanes load_even(const bf16 *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
inline Lanes load_odd(const bf16 *p) {
    __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), high));
}

// Numbers 0, 2, .. and 1, 3, .. of 32 put in order.
inline void interleave(Lanes &even, Lanes &odd) {
    const __m512i lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i upper = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    Lanes first = _mm512_permutex2var_ps(even, lower, odd);
    odd = _mm512_permutex2var_ps(even, upper, odd);
    even = first;
}

inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand where either is NaN.
inline Lanes max(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes min(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
inline Lanes round(Lanes a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes times_power_of_two(Lanes a, Lanes n) { return _mm512_scalef_ps(a, n); }
inline Lanes zero_where_below(Lanes v, Lanes x, float limit) {
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_LT_OQ), _mm512_setzero_ps());
}
// `yes` where x is below `limit`, else `no`, also where x is NaN.
inline Lanes where_below(Lanes x, float limit, Lanes yes, Lanes no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_LT_OQ), yes);
}
// Lane i + lane i + 8, and so on by halves.
inline float sum_of(Lanes v) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// NaN if any lane is.
inline float max_of(Lanes v) {
    if (_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0) return std::numeric_limits<float>::quiet_NaN();
    return _mm512_reduce_max_ps(v);
}
// `outside` in all lanes but begin .. end-1.
inline Lanes keep_range(Lanes v, int begin, int end, float outside) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>(first(end) & ~first(begin)), _mm512_set1_ps(outside), v);
}

// The same four bytes in every lane of 32 bits.
inline __m512i same_four(const int8_t *p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}

}  // namespace
}  // namespace diptych
