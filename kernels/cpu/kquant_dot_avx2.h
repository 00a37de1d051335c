// Products with K-quants and IQ4 by vpmaddubsw. Pairs of products are added in 16 bits as often as these hold: codes of
// four bits eight times, of five four, of six twice. IQ4 has signed numbers, whose sign goes to the activation.
#pragma once

#include "dot_avx2.h"
#include "kquants.h"

namespace diptych {
namespace {

template <int bits, int to>
inline __m256i bits_of_line(const uint8_t *lines, int i) {
    constexpr int of_line = 8 / bits;
    __m256i line = load_bytes(lines + i / of_line * kNextLine);
    int shift = bits * (i % of_line) - to;
    if (shift > 0) line = _mm256_srli_epi16(line, shift);
    if (shift < 0) line = _mm256_slli_epi16(line, -shift);
    return _mm256_and_si256(line, _mm256_set1_epi8(static_cast<char>(((1 << bits) - 1) << to)));
}

// Codes of four of the depth for each of 8 columns, place i of 8.
template <int Format>
inline __m256i load_codes(const uint8_t *lines, int i) {
    constexpr KQuant k = kquant(Format);
    __m256i code = bits_of_line<k.low, 0>(lines, i);
    if constexpr (k.high > 0) code = _mm256_or_si256(code, bits_of_line<k.high, k.low>(lines + high_begin(k), i));
    return code;
}

// The sums of a part of a group for 8 columns, without the offset; of IQ4 with it.
template <int Format>
inline __m256i dot_part(const uint8_t *lines, const int8_t *values, int part) {
    constexpr KQuant k = kquant(Format);
    constexpr int places = k.part / 4, most = 32767 / (2 * 127 * ((1 << (k.low + k.high)) - 1));
    constexpr int together = k.table ? 1 : most < places ? most : places;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i total = _mm256_setzero_si256(), pairs = total;
#pragma GCC unroll 8
    for (int p = 0; p < places; p++) {
        int i = part * places + p;
        __m256i code = load_codes<Format>(lines, i), same = same_four(values + 4 * i);
        if constexpr (k.table) {
            __m128i table = _mm_xor_si128(_mm_load_si128(reinterpret_cast<const __m128i *>(kTable)), _mm_set1_epi8(-128));
            code = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), code);
            same = _mm256_sign_epi8(same, code);
            code = _mm256_abs_epi8(code);
        }
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(code, same));
        if ((p + 1) % together == 0 || p + 1 == places) {
            total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, ones));
            pairs = _mm256_setzero_si256();
        }
    }
    return total;
}

inline Lanes bytes_as_floats(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}

inline Lanes signed_bytes_as_floats(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}

// d times the scale of 8 columns, and dmin times their least value, of a part of a group.
template <int Format>
inline void load_scales(const uint8_t *scales, int part, int column, Lanes d, Lanes dmin, Lanes &scale, Lanes &least) {
    constexpr KQuant k = kquant(Format);
    const uint8_t *at = scales + (k.part == 16 ? part * kColumns : 0) + column;
    if constexpr (Format == DIPTYCH_Q2_K) {
        __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(at)));
        scale = mul(_mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15))), d);
        least = mul(_mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4)), dmin);
    } else if constexpr (k.least) {
        scale = mul(bytes_as_floats(at), d);
        least = mul(bytes_as_floats(at + kColumns), dmin);
    } else {
        scale = mul(signed_bytes_as_floats(at), d);
    }
}

// sum += the products of one part of a group for 8 columns
template <int Format>
inline void add_part(const Group &x, const uint8_t *lines, int part, Lanes scale, Lanes least, Lanes &sum) {
    constexpr KQuant k = kquant(Format);
    constexpr int offset = k.table ? 0 : k.offset;
    __m256i dot = dot_part<Format>(lines, x.values, part);
    if constexpr (offset > 0) dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(offset * x.half_values[part]));
    if (x.fine != 0) {
        dot = _mm256_add_epi32(_mm256_slli_epi32(dot, 8), dot_part<Format>(lines, x.rest, part));
        if constexpr (offset > 0) dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(offset * x.half_rest[part]));
    }
    float step = x.fine != 0 ? x.scale / 256.0f : x.scale;
    sum = fma(_mm256_cvtepi32_ps(dot), mul(scale, splat(step)), sum);
    if constexpr (k.least) {
        float scaled = k.part == 16 ? scaled_half(x, part) : x.scaled_sum;
        sum = _mm256_fnmadd_ps(least, splat(scaled), sum);
    }
}

// As multiply_block, of a format with scales of scales.
template <int Format, int Rows>
[[gnu::noinline]] void multiply_kquant(const Group *panel, const uint8_t *weight, int groups, float *out) {
    constexpr KQuant k = kquant(Format);
    for (int column = 0; column < kColumns; column += kLanes) {
        Lanes sum[Rows];
        for (int m = 0; m < Rows; m++) sum[m] = splat(0.0f);
        const uint8_t *at = weight;
        const Group *x = panel;
        for (int s = 0; s < groups / kSuperGroups; s++) {
            const auto *halves = reinterpret_cast<const uint16_t *>(at) + column;
            Lanes d = load_halves(halves), dmin = k.least ? load_halves(halves + kColumns) : splat(0.0f);
            at += kquant_head_bytes(k);
            for (int g = 0; g < kSuperGroups; g++, x += kBlockRows, at += kquant_group_bytes(k)) {
                const uint8_t *lines = at + column / kStrip * kLine + column % kStrip * 4;
                for (int part = 0; part < kGroup / k.part; part++) {
                    Lanes scale, least = splat(0.0f);
                    load_scales<Format>(at + scales_begin(k), part, column, d, dmin, scale, least);
#pragma GCC unroll 4
                    for (int m = 0; m < Rows; m++) add_part<Format>(x[m], lines, part, scale, least, sum[m]);
                }
            }
        }
        for (int m = 0; m < Rows; m++) store(out + m * kColumns + column, sum[m]);
    }
}

}  // namespace
}  // namespace diptych
