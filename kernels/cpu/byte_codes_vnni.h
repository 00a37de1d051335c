// Products of one row with bytes in codes of four bits (bytes.h). Such a product waits for memory: five bits a weight are
// fetched instead of eight, and looked up in tables that are made on the way. The sums are those of the bytes, to the
// last bit. With two rows that costs one core more than it saves it.
#pragma once

#include "byte_dots_vnni.h"

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

// The high bytes of a segment by line, 0 where a line is not wide, and which groups have any: most have none.
struct HighBytes {
    alignas(64) int8_t bytes[kSegment];
    uint32_t groups = 0;
    static_assert(kLines / kCodedLines <= 32);

    HighBytes(const Segment &x, int lines) {
        for (int i = 0; i < lines * kFour; i += 32) {
            _mm256_store_si256(reinterpret_cast<__m256i *>(bytes + i), _mm256_setzero_si256());
        }
        for (int n = 0; n < kWide; n++) {
            int line = x.wide[n] / kLineBytes;
            std::memcpy(bytes + line * kFour, x.high[n], kFour);
            groups |= 1u << (line / kCodedLines);
        }
    }
};

// The sums of four columns, four parts each: of the values, and of the high bytes.
struct FourDots {
    __m512i low, high;

    __m512i together() const { return _mm512_add_epi32(low, _mm512_slli_epi32(high, 8)); }
};

// The four parts of 16 columns' sums, added up and put in order.
inline __m512i sums_of(const FourDots *fours) {
    __m512i a = fours[0].together(), b = fours[1].together(), c = fours[2].together(), d = fours[3].together();
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// dots += one group of activations times its weights; `high` counts where it is Wide.
template <bool Wide>
[[gnu::always_inline]] inline void add_coded_group(const TableMaker &table_of, const int8_t *values, const int8_t *high,
                                                   const uint8_t *group, FourDots (&dots)[kFours]) {
    const __m512i half = _mm512_set1_epi8(15);
    __m512i first = four_times(values), second = four_times(values + kLaneCodes);
    __m512i first_high = four_times(high), second_high = four_times(high + kLaneCodes);
#pragma GCC unroll 8
    for (int i = 0; i < kFours; i++) {
        __m512i table = table_of(group + slopes_at(i));
        __m512i both = _mm512_load_si512(group + codes_at(i));
        __m512i weights = _mm512_shuffle_epi8(table, _mm512_and_si512(both, half));
        add_dots(dots[i].low, weights, first);
        if (Wide) add_dots(dots[i].high, weights, first_high);
        weights = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(both, 4), half));
        add_dots(dots[i].low, weights, second);
        if (Wide) add_dots(dots[i].high, weights, second_high);
    }
}

// out[32] += one segment of a row of activations times its weights; = of the First one.
template <bool First, bool Fetch>
[[gnu::noinline]] void add_coded_segment_of(const Segment &x, const uint8_t *group, int lines, const float *scales,
                                            float *out) {
    const HighBytes high(x, lines);
    const TableMaker table_of;
    FourDots dots[kFours];
#pragma GCC unroll 8
    for (FourDots &four : dots) four.low = four.high = _mm512_setzero_si512();
    for (int g = 0; g < lines / kCodedLines; g++, group += kCodedBytes) {
        for (int line = 0; Fetch && line < kCodedBytes; line += 128) fetch<kByteAhead, 3>(group + line);
        const int8_t *values = x.values + g * kDepth, *of_values = high.bytes + g * kDepth;
        if ((high.groups >> g & 1u) != 0) {
            add_coded_group<true>(table_of, values, of_values, group, dots);
        } else {
            add_coded_group<false>(table_of, values, of_values, group, dots);
        }
    }
    Lanes scale = splat(x.scale);
#pragma GCC unroll 2
    for (int s = 0; s < 2; s++) {
        __m512i sum = _mm512_add_epi32(sums_of(dots + 4 * s), _mm512_set1_epi32(x.minus_128_sum));
        add_scaled<First>(out + s * kLanes, sum, mul(load(scales + s * kLanes), scale));
    }
}

template <bool First>
inline void add_coded_segment(const Segment &x, const uint8_t *group, int lines, const float *scales, float *out) {
    with_fetching<1, 1, 0>(
        [&](auto fetches) { add_coded_segment_of<First, fetches()>(x, group, lines, scales, out); });
}

}  // namespace
}  // namespace diptych
