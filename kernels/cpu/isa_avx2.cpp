#include "simd_avx2.h"
// The rest is written in terms of the lanes above.
#include "byte_dot_avx2.h"
#include "dot_avx2.h"
#include "kquant_dot_avx2.h"
#include "gemm_blocks.h"
#include "gemm_bytes.h"
#include "step_body.h"

namespace diptych {

extern const Kernels avx2_kernels;
const Kernels avx2_kernels = {
    "avx2", {run_step<Fp32>, run_step<WidenedBf16>, run_step<Blocks>, run_step<Bytes>}, false, false};

}  // namespace diptych
