// Products of few rows with bytes in codes of four bits (bytes.h). Such a product waits for memory: five bits a weight are
// fetched instead of eight, and looked up in tables that are made on the way. The sums are those of the bytes, to the
// last bit.
#pragma once

#include "byte_dot_vnni.h"

namespace diptych {
namespace {

inline __m512i four_times(const void *lane) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i *>(lane)));
}

// What makes the bytes of four columns out of their slopes and intercepts.
struct TableMaker {
    __m512i slope_of, intercept_of, codes;

    TableMaker() {
        const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
        slope_of = _mm512_add_epi8(_mm512_shuffle_epi8(lane, _mm512_setzero_si512()), _mm512_set1_epi16(0x0100));
        intercept_of = _mm512_add_epi8(slope_of, _mm512_set1_epi8(2));
        codes = four_times(kFirstCodes);
    }

    // Lane by lane the high bytes of code * slope + intercept: of codes 0 and 8, 1 and 9, ...
    __m512i operator()(const uint8_t *slopes) const {
        __m512i lines = four_times(slopes), slope = _mm512_shuffle_epi8(lines, slope_of);
        __m512i lower = _mm512_add_epi16(_mm512_mullo_epi16(slope, codes), _mm512_shuffle_epi8(lines, intercept_of));
        __m512i upper = _mm512_add_epi16(lower, _mm512_slli_epi16(slope, 3));
        return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, _mm512_srli_epi16(lower, 8), upper);
    }

    static constexpr uint16_t kFirstCodes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
};

// The high bytes of `Rows` segments by line, 0 where a line is no outlier, and which groups have any: most have none.
template <int Rows>
struct HighBytes {
    alignas(64) int8_t bytes[Rows][kSegment];
    uint32_t groups = 0;
    static_assert(kLines / kCodedLines <= 32);

    HighBytes(const Segment *x, int lines) {
        for (int m = 0; m < Rows; m++) {
            for (int i = 0; i < lines * kFour; i += 32) {
                _mm256_store_si256(reinterpret_cast<__m256i *>(bytes[m] + i), _mm256_setzero_si256());
            }
            for (int n = 0; n < kOutliers; n++) {
                int line = x[m].outliers[n] / kLineBytes;
                std::memcpy(bytes[m] + line * kFour, x[m].high[n], kFour);
                groups |= 1u << (line / kCodedLines);
            }
        }
    }
};

// Of one row the sums of 4 * Fours columns, four parts each: of the values, and of the high bytes.
template <int Fours>
struct CodedDots {
    __m512i low[Fours], high[Fours];

    __m512i together(int i) const { return _mm512_add_epi32(low[i], _mm512_slli_epi32(high[i], 8)); }

    // The four parts of 16 columns' sums, added up and put in order.
    __m512i sums(int strip) const {
        int i = strip * kStripFours;
        __m512i a = together(i), b = together(i + 1), c = together(i + 2), d = together(i + 3);
        __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    }
};

// dots += one group of activations times its weights; `high` counts where it is Wide.
template <int Rows, int Fours, bool Wide>
[[gnu::always_inline]] inline void add_coded_group(const TableMaker &table_of, const Segment *x,
                                                   const HighBytes<Rows> &high, int g, const uint8_t *group,
                                                   CodedDots<Fours> (&dots)[Rows]) {
    const __m512i half = _mm512_set1_epi8(15);
    __m512i values[Rows][2];
#pragma GCC unroll 4
    for (int m = 0; m < Rows; m++) {
        values[m][0] = four_times(x[m].values + g * kDepth);
        values[m][1] = four_times(x[m].values + g * kDepth + kLaneCodes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < Fours; i++) {
        __m512i table = table_of(group + slopes_at(i));
        __m512i both = _mm512_load_si512(group + codes_at(i));
        __m512i weights[2] = {_mm512_shuffle_epi8(table, _mm512_and_si512(both, half)),
                              _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(both, 4), half))};
#pragma GCC unroll 4
        for (int m = 0; m < Rows; m++) {
            add_dots(dots[m].low[i], weights[0], values[m][0]);
            add_dots(dots[m].low[i], weights[1], values[m][1]);
            if (!Wide) continue;
            add_dots(dots[m].high[i], weights[0], four_times(high.bytes[m] + g * kDepth));
            add_dots(dots[m].high[i], weights[1], four_times(high.bytes[m] + g * kDepth + kLaneCodes));
        }
    }
}

// out[Rows][32] += one segment of a panel of activations times its weights; = of the First one.
template <int Rows, bool First>
[[gnu::noinline]] void add_coded_segment(const Segment *x, const uint8_t *group, int lines, const float *scales,
                                         float *out) {
    constexpr bool kFetches = Rows > kFewCodedRows;
    constexpr int kStrips = Rows == 1 ? 2 : 1;  // whose sums fit into registers
    const HighBytes<Rows> high(x, lines);
    const TableMaker table_of;
    for (int s = 0; s < 2; s += kStrips) {
        CodedDots<kStrips * kStripFours> dots[Rows] = {};
        const uint8_t *at = group + s * kCodedStrip;
        for (int g = 0; g < lines / kCodedLines; g++, at += kCodedBytes) {
            for (int line = 0; kFetches && s == 0 && line < kCodedBytes; line += 128) fetch<kByteAhead, 3>(at + line);
            if ((high.groups >> g & 1u) != 0) {
                add_coded_group<Rows, kStrips * kStripFours, true>(table_of, x, high, g, at, dots);
            } else {
                add_coded_group<Rows, kStrips * kStripFours, false>(table_of, x, high, g, at, dots);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < Rows; m++) {
            Lanes scale = splat(x[m].scale);
#pragma GCC unroll 2
            for (int i = 0; i < kStrips; i++) {
                __m512i sum = _mm512_add_epi32(dots[m].sums(i), _mm512_set1_epi32(x[m].minus_128_sum));
                int column = (s + i) * kLanes;
                add_scaled<First>(out + m * kColumns + column, sum, mul(load(scales + column), scale));
            }
        }
    }
}

}  // namespace
}  // namespace diptych
