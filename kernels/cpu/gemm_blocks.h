// Weights in quantised blocks, activations quantised to 8 bits in groups; keys and values bf16.
//
// Batch invariance: a group's products are summed in whole numbers, exactly; the groups of an output follow each
// other from first to last in a register of its own.
#pragma once

#include "quantise.h"

namespace diptych {
namespace {

struct Blocks : Panels<Group, kBlockRows> {
    static int64_t input_bytes(int64_t depth) { return depth / kGroup * static_cast<int64_t>(sizeof(Group)); }

    static int64_t entries(int64_t width) { return width / kGroup; }

    static void ready(const float *values, Group *rows, int64_t stride, int64_t row, int64_t width) {
        quantise(values, place(rows, stride, row), kRows, width / kGroup);
    }

    static void tile(const Group *input, int64_t, int rows, const Linear &matrix, int64_t block, float *out) {
        const auto *weight = static_cast<const uint8_t *>(matrix.block(block));
        int groups = matrix.depth / kGroup;
        with_count<kRows>(rows, [&](auto n) {
            switch (matrix.format) {
                case DIPTYCH_Q4_0: return multiply_block<DIPTYCH_Q4_0, n()>(input, weight, groups, out);
                case DIPTYCH_Q4_1: return multiply_block<DIPTYCH_Q4_1, n()>(input, weight, groups, out);
                default: return multiply_block<DIPTYCH_Q8_0, n()>(input, weight, groups, out);
            }
        });
    }
};

}  // namespace
}  // namespace diptych
