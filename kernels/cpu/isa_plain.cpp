#include "simd_plain.h"
// The rest is written in terms of the lanes above.
#include "byte_dot_plain.h"
#include "dot_plain.h"
#include "kquant_dot_plain.h"
#include "gemm_blocks.h"
#include "gemm_bytes.h"
#include "step_body.h"

namespace diptych {

extern const Kernels plain_kernels;
const Kernels plain_kernels = {
    "plain", {run_step<Fp32>, run_step<WidenedBf16>, run_step<Blocks>, run_step<Bytes>}, false, false};

}  // namespace diptych
