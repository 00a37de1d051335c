#include "simd_avx512.h"
// The rest is written in terms of the lanes above.
#include "step_body.h"

namespace diptych {

extern const Kernels avx512_kernels;
const Kernels avx512_kernels = {"avx512", {run_step<Fp32>, run_step<WidenedBf16>, nullptr, nullptr}, false, false};

}  // namespace diptych
