#include "lanes_plain.h"
// The rest is written in terms of the lanes above.
#include "dots_plain.h"
#include "gemm_blocks.h"
#include "step_body.h"

namespace diptych {

extern const Kernels plain_kernels;
const Kernels plain_kernels = {"plain", {run_step<Fp32>, run_step<WidenedBf16>, run_step<Blocks>}, false};

}  // namespace diptych
