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
        const Linear::Section &section = matrix.section(block);
        const uint8_t *weight =
            static_cast<const uint8_t *>(section.data) + (block - section.first_block) * section.block_bytes;
        int groups = matrix.depth / kGroup;
        with_count<kRows>(rows, [&](auto n) {
            switch (section.format) {
                case DIPTYCH_Q4_0: return multiply_block<DIPTYCH_Q4_0, n()>(input, weight, groups, out);
                case DIPTYCH_Q4_1: return multiply_block<DIPTYCH_Q4_1, n()>(input, weight, groups, out);
                case DIPTYCH_Q8_0: return multiply_block<DIPTYCH_Q8_0, n()>(input, weight, groups, out);
                case DIPTYCH_IQ4_NL: return multiply_block<DIPTYCH_IQ4_NL, n()>(input, weight, groups, out);
                case DIPTYCH_MXFP4: return multiply_block<DIPTYCH_MXFP4, n()>(input, weight, groups, out);
                case DIPTYCH_Q2_K: return multiply_kquant<DIPTYCH_Q2_K, n()>(input, weight, groups, out);
                case DIPTYCH_Q3_K: return multiply_kquant<DIPTYCH_Q3_K, n()>(input, weight, groups, out);
                case DIPTYCH_Q4_K: return multiply_kquant<DIPTYCH_Q4_K, n()>(input, weight, groups, out);
                case DIPTYCH_Q5_K: return multiply_kquant<DIPTYCH_Q5_K, n()>(input, weight, groups, out);
                case DIPTYCH_Q6_K: return multiply_kquant<DIPTYCH_Q6_K, n()>(input, weight, groups, out);
                default: return multiply_kquant<DIPTYCH_IQ4_XS, n()>(input, weight, groups, out);
            }
        });
    }
};

}  // namespace
}  // namespace diptych
