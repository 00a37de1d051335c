#include "simd_avx512.h"
// The rest is written in terms of the lanes above.
#include "byte_dot_vnni.h"
#include "dot_vnni.h"
#include "kquant_dot_vnni.h"
#include "gemm_blocks.h"
#include "gemm_bytes.h"
#include "step_body.h"

namespace diptych {

extern const Kernels avx512_vnni_kernels;
const Kernels avx512_vnni_kernels = {"avx512_vnni", {nullptr, nullptr, run_step<Blocks>, run_step<Bytes>}, false, true};

}  // namespace diptych
