#include "bf16_kernels.h"

namespace diptych {

extern const Kernels avx512_bf16_kernels;
const Kernels avx512_bf16_kernels = bf16_kernels("avx512_bf16");

}  // namespace diptych
