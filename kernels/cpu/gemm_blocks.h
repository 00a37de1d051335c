// Weights in quantised blocks, activations quantised to 8 bits in groups; keys and values bf16.
//
// Batch invariance: a group's products are summed in whole numbers, exactly; the groups of an output follow each
// other from first to last in a register of its own.
#pragma once

#include "quantise.h"

namespace diptych {
namespace {

struct Blocks {
    using Value = float;
    using Input = Group;
    using Stored = bf16;
    using Embedded = bf16;
    static constexpr int kRows = kBlockRows;
    static constexpr bool kEven = true;

    static void begin(int) {}
    static void end() {}

    static void ready(const float *values, Group *to, int64_t width) { quantise(values, to, width / kGroup); }

    template <int Format>
    static void tile_of(const Group *input, int64_t stride, int rows, const void *weight, int depth, float *out) {
        int groups = depth / kGroup;
        const auto *left = static_cast<const uint8_t *>(weight), *right = left + strip_bytes(Format, groups);
        with_count<kRows>(rows, [&](auto n) {
            multiply_strip<Format, n()>(input, stride, left, groups, out);
            multiply_strip<Format, n()>(input, stride, right, groups, out + kStrip);
        });
    }

    static void tile(const Group *input, int64_t stride, int rows, const Linear &matrix, int64_t block, float *out) {
        const void *weight = matrix.block(block);
        switch (matrix.format) {
            case DIPTYCH_Q4_0: return tile_of<DIPTYCH_Q4_0>(input, stride, rows, weight, matrix.depth, out);
            case DIPTYCH_Q4_1: return tile_of<DIPTYCH_Q4_1>(input, stride, rows, weight, matrix.depth, out);
            default: return tile_of<DIPTYCH_Q8_0>(input, stride, rows, weight, matrix.depth, out);
        }
    }
};

}  // namespace
}  // namespace diptych
