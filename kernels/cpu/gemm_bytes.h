// Weights and activations in 8 bits with long segments; keys and values bf16.
//
// Batch invariance: a segment's products are summed in whole numbers, exactly; the segments of an output follow each
// other from first to last.
#pragma once

#include "quantise_rows.h"
#if defined(__AVX512VNNI__)
#include "byte_codes_vnni.h"
#endif

namespace diptych {
namespace {

// Calls add(whether it is the first, a segment of the panel, its weights, its lines, its scales) for all segments of a
// block of columns.
template <class Add>
inline void for_segments(const Segment *panel, const void *block, int32_t format, int64_t depth, Add add) {
    SegmentCut cut = SegmentCut::of(depth);
    const auto *weight = static_cast<const uint8_t *>(block);
    for (int s = 0; s < cut.count; s++, panel += kByteRows) {
        int lines = cut.lines_of(s);
        const uint8_t *scales = weight + segment_bytes(format, lines);
        const auto *as_floats = reinterpret_cast<const float *>(scales);
        if (s == 0) {
            add(std::true_type(), panel, weight, lines, as_floats);
        } else {
            add(std::false_type(), panel, weight, lines, as_floats);
        }
        weight = scales + kScaleBytes;
    }
}

struct Bytes : Panels<Segment, kByteRows> {
    static int64_t input_bytes(int64_t depth) {
        return SegmentCut::of(depth).count * static_cast<int64_t>(sizeof(Segment));
    }

    static int64_t entries(int64_t width) { return SegmentCut::of(width).count; }

    static void ready(const float *values, Segment *rows, int64_t stride, int64_t row, int64_t width) {
        Segment *to = place(rows, stride, row);
        SegmentCut cut = SegmentCut::of(width);
        for (int s = 0; s < cut.count; s++, to += kRows) {
            quantise_segment(values + static_cast<int64_t>(s) * cut.lines * kFour, cut.lines_of(s), *to);
        }
    }

    static void tile(const Segment *input, int64_t, int rows, const Linear &matrix, int64_t block, float *out) {
        with_count<kRows>(rows, [&](auto n) {
            for_segments(input, matrix.block(block), DIPTYCH_I8, matrix.depth, [&](auto first, auto... of_segment) {
                add_segment<n(), first()>(of_segment..., out);
            });
        });
    }

#if defined(__AVX512VNNI__)
    static constexpr int kReadsCodes = kCodedRows;

    static void coded_tile(const Segment *input, int rows, const Linear &matrix, int64_t block, float *out) {
        with_count<kCodedRows>(rows, [&](auto n) {
            auto add = [&](auto first, auto... of_segment) { add_coded_segment<n(), first()>(of_segment..., out); };
            for_segments(input, matrix.code_block(block), DIPTYCH_I8_CODED, matrix.depth, add);
        });
    }
#endif
};

}  // namespace
}  // namespace diptych
