#include "lanes_avx2.h"
// The rest is written in terms of the lanes above.
#include "dots_avx2.h"
#include "gemm_blocks.h"
#include "step_body.h"

namespace diptych {

extern const Kernels avx2_kernels;
const Kernels avx2_kernels = {"avx2", {run_step<Fp32>, run_step<WidenedBf16>, run_step<Blocks>}, false};

}  // namespace diptych
