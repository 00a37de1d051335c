// Kernels of CPUs with bf16 dot products and VNNI, by the sizes of tuning.h.
#pragma once

#include "simd_avx512.h"
// The rest is written in terms of the lanes above.
#include "gemm_pairs.h"
#include "byte_dot_vnni.h"
#include "dot_vnni.h"
#include "kquant_dot_vnni.h"
#include "gemm_blocks.h"
#include "gemm_bytes.h"
#include "step_body.h"

namespace diptych {
namespace {

constexpr Kernels bf16_kernels(const char *name) {
    return {name, {run_step<Fp32>, run_step<PairedBf16>, run_step<Blocks>, run_step<Bytes>}, true, true};
}

}  // namespace
}  // namespace diptych
