#include "simd_avx512.h"
// The rest is written in terms of the lanes above.
#include "gemm_tiles.h"
#include "step_body.h"

namespace diptych {

extern const Kernels amx_kernels;
const Kernels amx_kernels = {"amx", {run_step<Fp32>, run_step<TiledBf16>, nullptr, nullptr}, true, false};

}  // namespace diptych
