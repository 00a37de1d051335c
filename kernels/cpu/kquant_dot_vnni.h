// Products with K-quants and IQ4 by vpdpbusd: codes to bytes in registers, their products summed exactly in 32 bits.
#pragma once

#include "dot_vnni.h"
#include "kquants.h"

namespace diptych {
namespace {

// Bits `bits` wide of the four at place `i` of a line that holds 8 / bits of them, moved to bit `to` of their bytes.
template <int bits, int to>
[[gnu::always_inline]] inline __m512i bits_of_line(const uint8_t *lines, int i) {
    constexpr int of_line = 8 / bits;
    __m512i line = _mm512_loadu_si512(lines + i / of_line * kNextLine);
    int shift = bits * (i % of_line) - to;
    if (shift > 0) line = _mm512_srli_epi16(line, shift);
    if (shift < 0) line = _mm512_slli_epi16(line, -shift);
    return _mm512_and_si512(line, _mm512_set1_epi8(static_cast<char>(((1 << bits) - 1) << to)));
}

// Codes of four of the depth for each column of a strip, place i of 8.
template <int Format>
[[gnu::always_inline]] inline __m512i load_codes(const uint8_t *lines, int i) {
    constexpr KQuant k = kquant(Format);
    __m512i code = bits_of_line<k.low, 0>(lines, i);
    if constexpr (k.high > 0) code = _mm512_or_si512(code, bits_of_line<k.high, k.low>(lines + high_begin(k), i));
    if constexpr (k.table) {
        __m128i table = _mm_load_si128(reinterpret_cast<const __m128i *>(kTable));
        code = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), code);
    }
    return code;
}

inline Lanes bytes_as_floats(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}

inline Lanes signed_bytes_as_floats(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}

// d times the scale of each column of a strip, and dmin times its least value, of a part of a group.
template <int Format>
[[gnu::always_inline]] inline void load_scales(const uint8_t *scales, int part, int strip, Lanes d, Lanes dmin,
                                               Lanes &scale, Lanes &least) {
    constexpr KQuant k = kquant(Format);
    const uint8_t *at = scales + (k.part == 16 ? part * kColumns : 0) + strip * kStrip;
    if constexpr (Format == DIPTYCH_Q2_K) {
        __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
        scale = mul(_mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15))), d);
        least = mul(_mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4)), dmin);
    } else if constexpr (k.least) {
        scale = mul(bytes_as_floats(at), d);
        least = mul(bytes_as_floats(at + kColumns), dmin);
    } else {
        scale = mul(signed_bytes_as_floats(at), d);
    }
}

// dot[row][strip] = the bytes of a part of a group's activations times its codes; `bytes` are those of the first row.
template <int Format, int Rows, bool Fetch>
[[gnu::always_inline]] inline void add_codes(const int8_t *bytes, const uint8_t *group, int part,
                                             __m512i (&dot)[Rows][2]) {
    constexpr KQuant k = kquant(Format);
    constexpr int places = k.part / 4;
#pragma GCC unroll 8
    for (int p = 0; p < places; p++) {
        int i = part * places + p;
        if (Fetch && i % (8 / k.low) == 0) fetch<kAhead, 2>(group + i / (8 / k.low) * kNextLine);
        if (Fetch && k.high > 0 && i % (8 / (k.high + (k.high == 0))) == 0) {
            fetch<kAhead, 2>(group + high_begin(k) + i / (8 / (k.high + (k.high == 0))) * kNextLine);
        }
        __m512i left = load_codes<Format>(group, i), right = load_codes<Format>(group + kLine, i);
#pragma GCC unroll 16
        for (int m = 0; m < Rows; m++) {
            add_line(dot[m], left, right, m, bytes + m * static_cast<int64_t>(sizeof(Group)) + 4 * i);
        }
    }
}

template <int Format, int Rows>
[[gnu::always_inline]] inline void add_kquant_group(const Group *x, const uint8_t *group, const Lanes (&d)[2],
                                                    const Lanes (&dmin)[2], Lanes (&sum)[Rows][2]) {
    constexpr KQuant k = kquant(Format);
    constexpr bool kFetches = Rows > kFewBlockRows;
    const uint8_t *scales = group + scales_begin(k);
#pragma GCC unroll 2
    for (int part = 0; part < kGroup / k.part; part++) {
        __m512i dot[Rows][2];
#pragma GCC unroll 16
        for (int m = 0; m < Rows; m++) {
            int32_t sum_of = k.part == 16 ? half_sum(x[m], part) : 0;
            int32_t begin = k.offset == 128 ? x[m].minus_128_values : -k.offset * sum_of;
            dot[m][0] = dot[m][1] = _mm512_set1_epi32(begin);
        }
        add_codes<Format, Rows, kFetches>(x->values, group, part, dot);
#pragma GCC unroll 2
        for (int strip = 0; strip < 2; strip++) {
            Lanes scale, least = splat(0.0f);
            load_scales<Format>(scales, part, strip, d[strip], dmin[strip], scale, least);
#pragma GCC unroll 16
            for (int m = 0; m < Rows; m++) {
                sum[m][strip] = fma(_mm512_cvtepi32_ps(dot[m][strip]), mul(scale, splat(x[m].scale)), sum[m][strip]);
                if constexpr (k.least) {
                    float scaled = k.part == 16 ? scaled_half(x[m], part) : x[m].scaled_sum;
                    sum[m][strip] = _mm512_fnmadd_ps(least, splat(scaled), sum[m][strip]);
                }
            }
        }
    }
    if (kFetches) fetch<kAhead, 2>(scales);
}

// left += what the first bytes of one fine group left over
template <int Format>
[[gnu::always_inline]] inline void add_kquant_rest(const Group &x, const uint8_t *group, const Lanes (&d)[2],
                                                   Lanes (&left)[2]) {
    constexpr KQuant k = kquant(Format);
    Lanes step = splat(x.scale * (1.0f / 256.0f)), none = splat(0.0f);
#pragma GCC unroll 2
    for (int part = 0; part < kGroup / k.part; part++) {
        __m512i dot[1][2];
        int32_t begin = k.offset == 128 ? x.minus_128_rest : k.part == 16 ? -k.offset * x.half_rest[part] : 0;
        dot[0][0] = dot[0][1] = _mm512_set1_epi32(begin);
        add_codes<Format, 1, false>(x.rest, group, part, dot);
#pragma GCC unroll 2
        for (int strip = 0; strip < 2; strip++) {
            Lanes scale, least;
            load_scales<Format>(group + scales_begin(k), part, strip, d[strip], none, scale, least);
            left[strip] = fma(_mm512_cvtepi32_ps(dot[0][strip]), mul(scale, step), left[strip]);
        }
    }
}

// The same for all fine groups of a row.
template <int Format>
[[gnu::always_inline]] inline void add_kquant_rests(const Group *row, const uint8_t *weight, Lanes (&left)[2]) {
    constexpr KQuant k = kquant(Format);
    for (const Group *entry = row; entry->listed >= 0; entry += kBlockRows) {
        int64_t g = entry->listed;
        const uint8_t *super = weight + g / kSuperGroups * kquant_bytes(k);
        const auto *halves = reinterpret_cast<const uint16_t *>(super);
        Lanes d[2] = {load_halves(halves), load_halves(halves + kStrip)};
        const uint8_t *group = super + kquant_head_bytes(k) + g % kSuperGroups * kquant_group_bytes(k);
        add_kquant_rest<Format>(row[g * kBlockRows], group, d, left);
    }
}

// As multiply_block, of a format with scales of scales.
template <int Format, int Rows>
[[gnu::noinline]] void multiply_kquant(const Group *panel, const uint8_t *weight, int groups, float *out) {
    constexpr KQuant k = kquant(Format);
    constexpr bool kTogether = Rows <= 2;
    Lanes sum[Rows][2], left[Rows][2];
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) sum[m][0] = sum[m][1] = left[m][0] = left[m][1] = splat(0.0f);
    const uint8_t *at = weight;
    const Group *x = panel;
    for (int s = 0; s < groups / kSuperGroups; s++) {
        const auto *halves = reinterpret_cast<const uint16_t *>(at);
        Lanes d[2] = {load_halves(halves), load_halves(halves + kStrip)}, dmin[2] = {d[0], d[1]};
        if constexpr (k.least) {
            dmin[0] = load_halves(halves + kColumns);
            dmin[1] = load_halves(halves + kColumns + kStrip);
        }
        at += kquant_head_bytes(k);
        for (int g = 0; g < kSuperGroups; g++, x += kBlockRows, at += kquant_group_bytes(k)) {
            add_kquant_group<Format, Rows>(x, at, d, dmin, sum);
            for (int m = 0; kTogether && m < Rows; m++) {
                if (x[m].fine != 0) add_kquant_rest<Format>(x[m], at, d, left[m]);
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) {
        if constexpr (!kTogether) add_kquant_rests<Format>(panel + m, weight, left[m]);
        store(out + m * kColumns, add(sum[m][0], left[m][0]));
        store(out + m * kColumns + kLanes, add(sum[m][1], left[m][1]));
    }
}

}  // namespace
}  // namespace diptych
