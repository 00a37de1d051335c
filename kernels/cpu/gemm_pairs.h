// bf16 pairs multiplied as they are (vdpbf16ps), inputs rounded to bf16.
#pragma once

#include "gemm.h"

namespace diptych {
namespace {

struct PairedBf16 : AnyKind {
    using Value = bf16;
    using Input = bf16;
    using Stored = bf16;
    static constexpr int kRows = kGemmRows;
    static constexpr bool kEven = true;

    static void begin(int) {}
    static void end() {}
    static int64_t input_bytes(int64_t depth) { return depth * static_cast<int64_t>(sizeof(Input)); }

    static __m512bh pairs(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }
    static __m512bh same_pair(const bf16 *p) {
        int32_t both;
        std::memcpy(&both, p, sizeof both);
        return (__m512bh)_mm512_set1_epi32(both);
    }

    template <int Rows>
    static void multiply(const bf16 *input, int64_t stride, const bf16 *weight, int depth, float *out) {
        Lanes sum[Rows][kRegisters];
        for (int m = 0; m < Rows; m++) sum[m][0] = sum[m][1] = splat(0.0f);
        for (int k = 0; k < depth; k += 2, weight += 2 * kColumns) {
            if (Rows > kFewRows) fetch<8192, 2>(weight);
            __m512bh left = pairs(weight), right = pairs(weight + kColumns);
#pragma GCC unroll 16
            for (int m = 0; m < Rows; m++) {
                __m512bh x = same_pair(input + m * stride + k);
                sum[m][0] = _mm512_dpbf16_ps(sum[m][0], left, x);
                sum[m][1] = _mm512_dpbf16_ps(sum[m][1], right, x);
            }
        }
        store_tile<Rows>(sum, out);
    }

    static void tile(const bf16 *input, int64_t stride, int rows, const Linear &matrix, int64_t block, float *out) {
        const auto *weight = static_cast<const bf16 *>(matrix.block(block));
        with_count<kRows>(rows, [&](auto n) { multiply<n()>(input, stride, weight, matrix.depth, out); });
    }
};

}  // namespace
}  // namespace diptych
