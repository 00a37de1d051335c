// avx512_bf16 as a Zen 5 wants it: the same numbers, read differently.
#define DIPTYCH_FOR_ZEN5
#include "lanes_avx512.h"
// The rest is written in terms of the lanes above.
#include "gemm_pairs.h"
#include "byte_dots_vnni.h"
#include "dots_vnni.h"
#include "gemm_blocks.h"
#include "gemm_bytes.h"
#include "step_body.h"

namespace diptych {

extern const Kernels avx512_zen5_kernels;
const Kernels avx512_zen5_kernels = {
    "avx512_zen5", {run_step<Fp32>, run_step<PairedBf16>, run_step<Blocks>, run_step<Bytes>}, true, true};

}  // namespace diptych
