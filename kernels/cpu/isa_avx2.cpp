#include "lanes_avx2.h"
// The rest is written in terms of the lanes above.
#include "step_body.h"

namespace diptych {

extern const Kernels avx2_kernels;
const Kernels avx2_kernels = {"avx2", run_step<Fp32>, run_step<WidenedBf16>, false};

}  // namespace diptych
