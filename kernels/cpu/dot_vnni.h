// Products with quantised blocks by vpdpbusd: 64 products of bytes an instruction, summed exactly in 32 bits.
#pragma once

#include <immintrin.h>

#include "gemm.h"
#include "blocks.h"
#include "vnni.h"

namespace diptych {
namespace {

constexpr int kBlockRows = 6;  // of two strips: 12 sums, 12 dots, 2 weights and 1 activation in 32 registers
constexpr int kAhead = 8192;

// NaN if any is.
inline float peak_of_group(const float *x) {
    __m512 a = _mm512_abs_ps(load(x)), b = _mm512_abs_ps(load(x + kLanes));
    __mmask16 bad = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
    return bad != 0 ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(max(a, b));
}

inline __m128i to_bytes(Lanes whole) { return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole)); }

// Stores 32 whole numbers as bytes and gives the sums of each 16.
inline void store_bytes(const Lanes (&whole)[2], int8_t *to, int32_t (&sums_of)[2]) {
    __m256i bytes = _mm256_set_m128i(to_bytes(whole[1]), to_bytes(whole[0]));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), bytes);
    __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    __m256i sums = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
    sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
    sums_of[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(sums));
    sums_of[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1));
}

// Gives the sums of each 16 values, and those of the rest where there is room for it.
inline void round_group(const float *x, float inverse, int8_t *values, int32_t (&sums)[2], int8_t *rest,
                        int32_t (&rest_sums)[2]) {
    Lanes scaled[2], whole[2];
    for (int i = 0; i < 2; i++) {
        scaled[i] = mul(load(x + i * kLanes), splat(inverse));
        whole[i] = round(scaled[i]);
    }
    if (rest != nullptr) {
        Lanes more[2];
        for (int i = 0; i < 2; i++) {
            more[i] = round(mul(sub(scaled[i], whole[i]), splat(256.0f)));
            more[i] = max(splat(-127.0f), min(splat(127.0f), more[i]));
        }
        store_bytes(more, rest, rest_sums);
    }
    store_bytes(whole, values, sums);
}

inline Lanes load_halves(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

template <int Format>
inline Lanes load_scales(const uint16_t *p) {
    if constexpr (Format == DIPTYCH_MXFP4) return load(reinterpret_cast<const bf16 *>(p));
    return load_halves(p);
}

// Four values of the depth for each column of a strip, line i of 8 as if every format had a line for each four.
template <int Format>
inline __m512i load_line(const uint8_t *lines, int i) {
    if constexpr (Format == DIPTYCH_Q8_0) return _mm512_loadu_si512(lines + i * kNextLine);
    __m512i both = _mm512_loadu_si512(lines + i / 2 * kNextLine);
    if (i % 2 != 0) both = _mm512_srli_epi16(both, 4);
    __m512i code = _mm512_and_si512(both, _mm512_set1_epi8(15));
    if constexpr (!has_table(Format)) return code;
    __m128i table = _mm_load_si128(reinterpret_cast<const __m128i *>(table_of(Format)));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), code);
}

template <int Format>
inline int32_t offset_of(int32_t minus_8, int32_t minus_128) {
    return Format == DIPTYCH_Q4_0 ? minus_8 : Format == DIPTYCH_Q8_0 || has_table(Format) ? minus_128 : 0;
}

// dot[row][strip] += the bytes of one group's activations times its weights; `bytes` are those of the first row.
// With Fetch the lines kAhead further are asked for one by one, as these are read: all at once they wait in line.
template <int Format, int Rows, bool Fetch>
[[gnu::always_inline]] inline void add_bytes(const int8_t *bytes, const uint8_t *group, __m512i (&dot)[Rows][2]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        bool new_line = Format == DIPTYCH_Q8_0 || i % 2 == 0;
        if (Fetch && new_line) fetch<kAhead, 2>(group + i * lines(Format) / 8 * kNextLine);
        __m512i left = load_line<Format>(group, i);
        __m512i right = load_line<Format>(group + kLine, i);
#pragma GCC unroll 16
        for (int m = 0; m < Rows; m++) {
            add_line(dot[m], left, right, m, bytes + m * static_cast<int64_t>(sizeof(Group)) + 4 * i);
        }
    }
}

template <int Format, int Rows>
[[gnu::always_inline]] inline void add_group(const Group *x, const uint8_t *group, Lanes (&sum)[Rows][2]) {
    __m512i dot[Rows][2];
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) {
        dot[m][0] = dot[m][1] = _mm512_set1_epi32(offset_of<Format>(x[m].minus_8_values, x[m].minus_128_values));
    }
    constexpr bool kFetches = Rows > kFewBlockRows;
    add_bytes<Format, Rows, kFetches>(x->values, group, dot);
    if (kFetches) fetch<kAhead, 2>(group + 2 * lines(Format) * kLine);
#pragma GCC unroll 2
    for (int strip = 0; strip < 2; strip++) {
        GroupOfStrip parts = strip_of(group, Format, strip);
        Lanes scale = load_scales<Format>(parts.scales), least = splat(0.0f);
        if constexpr (Format == DIPTYCH_Q4_1) least = load_halves(parts.least);
#pragma GCC unroll 16
        for (int m = 0; m < Rows; m++) {
            sum[m][strip] = fma(_mm512_cvtepi32_ps(dot[m][strip]), mul(scale, splat(x[m].scale)), sum[m][strip]);
            if constexpr (Format == DIPTYCH_Q4_1) sum[m][strip] = fma(least, splat(x[m].scaled_sum), sum[m][strip]);
        }
    }
}

// left += what the first bytes of one fine group left over
template <int Format>
[[gnu::always_inline]] inline void add_rest(const Group &x, const uint8_t *group, Lanes (&left)[2]) {
    __m512i dot[1][2];
    dot[0][0] = dot[0][1] = _mm512_set1_epi32(offset_of<Format>(x.minus_8_rest, x.minus_128_rest));
    add_bytes<Format, 1, false>(x.rest, group, dot);
    Lanes step = splat(x.scale * (1.0f / 256.0f));
#pragma GCC unroll 2
    for (int strip = 0; strip < 2; strip++) {
        Lanes scale = load_scales<Format>(strip_of(group, Format, strip).scales);
        left[strip] = fma(_mm512_cvtepi32_ps(dot[0][strip]), mul(scale, step), left[strip]);
    }
}

// The same for all fine groups of a row.
template <int Format>
[[gnu::always_inline]] inline void add_rests(const Group *row, const uint8_t *weight, Lanes (&left)[2]) {
    for (const Group *entry = row; entry->listed >= 0; entry += kBlockRows) {
        const Group &x = row[static_cast<int64_t>(entry->listed) * kBlockRows];
        add_rest<Format>(x, weight + static_cast<int64_t>(entry->listed) * group_bytes(Format), left);
    }
}

// out[Rows][32] = a panel of activations x one block of columns
//
// The rests have sums of their own, so that they may come when they cost least: of one or two rows together with the
// values, for weights are read but once; of more rows after these, by the list, for a branch for each row and group
// would be guessed wrongly too often.
template <int Format, int Rows>
[[gnu::noinline]] void multiply_block(const Group *panel, const uint8_t *weight, int groups, float *out) {
    constexpr bool kTogether = Rows <= 2;
    Lanes sum[Rows][2], left[Rows][2];
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) sum[m][0] = sum[m][1] = left[m][0] = left[m][1] = splat(0.0f);
    const uint8_t *group = weight;
    for (const Group *x = panel; x != panel + static_cast<int64_t>(groups) * kBlockRows; x += kBlockRows) {
        add_group<Format, Rows>(x, group, sum);
        for (int m = 0; kTogether && m < Rows; m++) {
            if (x[m].fine != 0) add_rest<Format>(x[m], group, left[m]);
        }
        group += group_bytes(Format);
    }
#pragma GCC unroll 16
    for (int m = 0; m < Rows; m++) {
        if constexpr (!kTogether) add_rests<Format>(panel + m, weight, left[m]);
        store(out + m * kColumns, add(sum[m][0], left[m][0]));
        store(out + m * kColumns + kLanes, add(sum[m][1], left[m][1]));
    }
}

}  // namespace
}  // namespace diptych
