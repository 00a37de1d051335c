// Products of one row with bytes in codes of four bits (bytes.h). Such a product waits for memory: five bits a weight are
// fetched instead of eight, and unfolded in registers. The sums are those of the bytes, to the last bit. With two rows
// unfolding costs one core more than it saves it.
#pragma once

#include "byte_dots_vnni.h"

namespace diptych {
namespace {

constexpr int kCodesAhead = 4096;  // as kByteAhead

// 16 bits for each of 16 columns, once for each half of a column's four bytes.
inline __m512i twice(__m256i of_columns) {
    __m512i pairs = _mm512_cvtepu16_epi32(of_columns);
    return _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 16));
}

// By what the codes of a strip's columns become bytes.
struct StripLine {
    __m512i slope, intercept;

    StripLine(const uint8_t *group, int strip) {
        const auto *columns = reinterpret_cast<const __m256i *>(group + kSlopes) + strip;
        slope = twice(_mm256_load_si256(columns));
        intercept = twice(_mm256_load_si256(columns + 2));
    }

    // The high bytes of code * slope + intercept: `even` has the codes of the first and third byte of every four, `odd`
    // those of the others.
    __m512i bytes(__m512i even, __m512i odd) const {
        even = _mm512_add_epi16(_mm512_mullo_epi16(even, slope), intercept);
        odd = _mm512_add_epi16(_mm512_mullo_epi16(odd, slope), intercept);
        return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, _mm512_srli_epi16(even, 8), odd);
    }
};

// The high bytes of a segment by line, 0 where a line is not wide.
inline void spread_high(const Segment &x, int lines, int8_t (&high)[kSegment]) {
    for (int i = 0; i < lines * kFour; i += 32) {
        _mm256_store_si256(reinterpret_cast<__m256i *>(high + i), _mm256_setzero_si256());
    }
    for (int n = 0; n < kWide; n++) std::memcpy(high + x.wide[n] / kLineBytes * kFour, x.high[n], kFour);
}

// The sums of one strip: of the values, and of the high bytes.
struct StripDots {
    __m512i low, high;

    [[gnu::always_inline]] void add(__m512i weights, const int8_t *values, const int8_t *high_bytes) {
        add_dots(low, weights, same_four(values));
        add_dots(high, weights, same_four(high_bytes));
    }
};

// out[32] += one segment of a row of activations times its weights; = of the First one.
template <bool First>
[[gnu::noinline]] void add_coded_segment(const Segment &x, const uint8_t *group, int lines, const float *scales,
                                         float *out) {
    alignas(64) int8_t high[kSegment];
    spread_high(x, lines, high);
    const __m512i offset = _mm512_set1_epi32(x.minus_128_sum), none = _mm512_setzero_si512();
    const __m512i one_code = _mm512_set1_epi16(15);
    StripDots dots[2] = {{offset, none}, {offset, none}};
    for (int line = 0; line < lines; line += kCodedLines, group += kCodedBytes) {
        const StripLine strips[2] = {{group, 0}, {group, 1}};
        fetch<kCodesAhead, 3>(group + kSlopes);
#pragma GCC unroll 4
        for (int row = 0; row < kCodedLines / 2; row++) {
            const uint8_t *codes = group + row * kCodeRow;
            fetch<kCodesAhead, 3>(codes);
            const int8_t *values = x.values + (line + 2 * row) * kFour, *wide = high + (line + 2 * row) * kFour;
#pragma GCC unroll 2
            for (int s = 0; s < 2; s++) {
                __m512i both = strip_of_line(codes, s);
                __m512i first = _mm512_and_si512(both, one_code);
                __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), one_code);
                __m512i third = _mm512_and_si512(_mm512_srli_epi16(both, 8), one_code);
                __m512i fourth = _mm512_srli_epi16(both, 12);
                dots[s].add(strips[s].bytes(first, third), values, wide);
                dots[s].add(strips[s].bytes(second, fourth), values + kFour, wide + kFour);
            }
        }
    }
    Lanes scale = splat(x.scale);
#pragma GCC unroll 2
    for (int s = 0; s < 2; s++) {
        __m512i sum = _mm512_add_epi32(dots[s].low, _mm512_slli_epi32(dots[s].high, 8));
        add_scaled<First>(out + s * kLanes, sum, mul(load(scales + s * kLanes), scale));
    }
}

}  // namespace
}  // namespace diptych
