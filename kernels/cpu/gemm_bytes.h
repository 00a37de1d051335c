// Weights and activations in 8 bits with long segments; keys and values bf16.
//
// Batch invariance: a segment's products are summed in whole numbers, exactly; the segments of an output follow each
// other from first to last.
#pragma once

#include "byte_rows.h"

namespace diptych {
namespace {

// out[Rows][32] = a panel of activations x one block of columns
template <int Rows>
inline void multiply_segments(const Segment *panel, const uint8_t *weight, SegmentCut cut, float *out) {
    for (int i = 0; i < Rows * kColumns; i++) out[i] = 0.0f;
    for (int s = 0; s < cut.count; s++, panel += kByteRows) {
        int lines = cut.lines_of(s);
        const uint8_t *scales = weight + static_cast<int64_t>(lines) * kLineBytes;
        add_segment<Rows>(panel, weight, lines, reinterpret_cast<const float *>(scales), out);
        weight = scales + kScaleBytes;
    }
}

struct Bytes : Panels<Segment, kByteRows> {
    static int64_t input_bytes(int64_t depth) {
        return SegmentCut::of(depth).count * static_cast<int64_t>(sizeof(Segment));
    }

    static void ready(const float *values, Segment *rows, int64_t stride, int64_t row, int64_t width) {
        Segment *to = place(rows, stride, row);
        SegmentCut cut = SegmentCut::of(width);
        for (int s = 0; s < cut.count; s++, to += kRows) {
            quantise_segment(values + static_cast<int64_t>(s) * cut.lines * kFour, cut.lines_of(s), *to);
        }
    }

    static void tile(const Segment *input, int64_t, int rows, const Linear &matrix, int64_t block, float *out) {
        const auto *weight = static_cast<const uint8_t *>(matrix.block(block));
        SegmentCut cut = SegmentCut::of(matrix.depth);
        with_count<kRows>(rows, [&](auto n) { multiply_segments<n()>(input, weight, cut, out); });
    }
};

}  // namespace
}  // namespace diptych
