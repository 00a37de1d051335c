#include "lanes_avx512.h"
// The rest is written in terms of the lanes above.
#include "gemm_pairs.h"
#include "byte_dots_vnni.h"
#include "dots_vnni.h"
#include "gemm_blocks.h"
#include "gemm_bytes.h"
#include "step_body.h"

namespace diptych {

extern const Kernels avx512_bf16_kernels;
const Kernels avx512_bf16_kernels = {
    "avx512_bf16", {run_step<Fp32>, run_step<PairedBf16>, run_step<Blocks>, run_step<Bytes>}, true, true};

}  // namespace diptych
