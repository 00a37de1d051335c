// Products with quantised blocks by vpmaddubsw, which adds pairs of products in 16 bits with saturation: kept
// exact by keeping the sums small. Q4: 8 x 2 x 15 x 127 = 30,480. Q8: 2 x 128 x 127 = 32,512, with the sign moved
// from the weight to the activation; tables alike.
#pragma once

#include <immintrin.h>

#include "blocks.h"
#include "gemm.h"

namespace diptych {
namespace {

constexpr int kBlockRows = 4;

// NaN if any is.
inline float peak_of_group(const float *x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 top = _mm256_setzero_ps(), bad = _mm256_setzero_ps();
    for (int i = 0; i < kGroup; i += kLanes) {
        __m256 size = _mm256_andnot_ps(sign, load(x + i));
        bad = _mm256_or_ps(bad, _mm256_cmp_ps(size, size, _CMP_UNORD_Q));
        top = max(top, size);
    }
    if (_mm256_movemask_ps(bad) != 0) return std::numeric_limits<float>::quiet_NaN();
    float lane[kLanes], peak = 0.0f;
    store(lane, top);
    for (int i = 0; i < kLanes; i++) peak = lane[i] > peak ? lane[i] : peak;
    return peak;
}

// Stores 32 whole numbers as bytes and gives the sums of each 16.
inline void store_bytes(const Lanes (&numbers)[4], int8_t *values, int32_t (&sums)[2]) {
    __m256i whole[4];
    for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(numbers[i]);
    // Packing works within halves of registers; the permutation puts the fours of bytes back in order.
    __m256i first = _mm256_packs_epi32(whole[0], whole[1]), second = _mm256_packs_epi32(whole[2], whole[3]);
    __m256i bytes = _mm256_packs_epi16(first, second);
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(values), bytes);
    for (int half = 0; half < 2; half++) {
        int32_t lane[8], sum = 0;
        __m256i pairs = _mm256_add_epi32(whole[2 * half], whole[2 * half + 1]);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(lane), pairs);
        for (int32_t one : lane) sum += one;
        sums[half] = sum;
    }
}

// Gives the sums of each 16 values, and those of the rest where there is room for it.
inline void round_group(const float *x, float inverse, int8_t *values, int32_t (&sums)[2], int8_t *rest,
                        int32_t (&rest_sums)[2]) {
    Lanes whole[4], more[4];
    for (int i = 0; i < 4; i++) {
        Lanes scaled = mul(load(x + i * kLanes), splat(inverse));
        whole[i] = round(scaled);
        more[i] = round(mul(sub(scaled, whole[i]), splat(256.0f)));
        more[i] = max(splat(-127.0f), min(splat(127.0f), more[i]));
    }
    if (rest != nullptr) store_bytes(more, rest, rest_sums);
    store_bytes(whole, values, sums);
}

inline Lanes load_halves(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}

template <int Format>
inline Lanes load_scales(const uint16_t *p) {
    if constexpr (Format == DIPTYCH_MXFP4) return load(reinterpret_cast<const bf16 *>(p));
    return load_halves(p);
}

inline __m256i load_bytes(const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }

// Four products of signed bytes for each of 8 columns, in 32 bits.
inline __m256i dot_signed(__m256i weight, const int8_t *values) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(same_four(values), weight));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// The sums of a group for 8 columns, without the offset; of signed bytes with it.
template <int Format>
inline __m256i dot_group(const uint8_t *line, const int8_t *values) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(-128);
    __m256i total = _mm256_setzero_si256();
    if constexpr (Format == DIPTYCH_Q8_0) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m256i weight = _mm256_xor_si256(load_bytes(line + i * kNextLine), flip);
            total = _mm256_add_epi32(total, dot_signed(weight, values + 4 * i));
        }
        return total;
    } else if constexpr (has_table(Format)) {
        __m128i table = _mm_load_si128(reinterpret_cast<const __m128i *>(table_of(Format)));
        __m256i signed_table = _mm256_xor_si256(_mm256_broadcastsi128_si256(table), flip);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m256i both = load_bytes(line + i * kNextLine);
            __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            first = _mm256_shuffle_epi8(signed_table, first), second = _mm256_shuffle_epi8(signed_table, second);
            total = _mm256_add_epi32(total, dot_signed(first, values + 8 * i));
            total = _mm256_add_epi32(total, dot_signed(second, values + 8 * i + 4));
        }
        return total;
    } else {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m256i both = load_bytes(line + i * kNextLine);
            __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
            total = _mm256_add_epi16(total, _mm256_maddubs_epi16(first, same_four(values + 8 * i)));
            total = _mm256_add_epi16(total, _mm256_maddubs_epi16(second, same_four(values + 8 * i + 4)));
        }
        return _mm256_madd_epi16(total, ones);
    }
}

// sum += the products of one group for 8 columns
template <int Format>
inline void add_products(const Group &x, const uint8_t *line, Lanes scale, Lanes least, Lanes &sum) {
    __m256i dot = dot_group<Format>(line, x.values);
    if constexpr (Format == DIPTYCH_Q4_0) dot = _mm256_add_epi32(dot, _mm256_set1_epi32(x.minus_8_values));
    if (x.fine != 0) {
        dot = _mm256_add_epi32(_mm256_slli_epi32(dot, 8), dot_group<Format>(line, x.rest));
        if constexpr (Format == DIPTYCH_Q4_0) dot = _mm256_add_epi32(dot, _mm256_set1_epi32(x.minus_8_rest));
    }
    float step = x.fine != 0 ? x.scale / 256.0f : x.scale;
    sum = fma(_mm256_cvtepi32_ps(dot), mul(scale, splat(step)), sum);
    if constexpr (Format == DIPTYCH_Q4_1) sum = fma(least, splat(x.scaled_sum), sum);
}

// out[Rows][32] = a panel of activations x one block of columns
template <int Format, int Rows>
[[gnu::noinline]] void multiply_block(const Group *panel, const uint8_t *weight, int groups, float *out) {
    for (int column = 0; column < kColumns; column += kLanes) {
        Lanes sum[Rows];
        for (int m = 0; m < Rows; m++) sum[m] = splat(0.0f);
        int within = column % kStrip;
        for (int g = 0; g < groups; g++) {
            GroupOfStrip group = strip_of(weight + g * group_bytes(Format), Format, column / kStrip);
            Lanes scale = load_scales<Format>(group.scales + within);
            Lanes least = Format == DIPTYCH_Q4_1 ? load_halves(group.least + within) : splat(0.0f);
#pragma GCC unroll 4
            for (int m = 0; m < Rows; m++) {
                add_products<Format>(panel[g * kBlockRows + m], group.lines + within * 4, scale, least, sum[m]);
            }
        }
        for (int m = 0; m < Rows; m++) store(out + m * kColumns + column, sum[m]);
    }
}

}  // namespace
}  // namespace diptych
