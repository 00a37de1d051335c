// avx512_bf16 tuned for Zen 5: the same numbers, read differently.
#define DIPTYCH_FOR_ZEN5
#include "bf16_kernels.h"

namespace diptych {

extern const Kernels avx512_zen5_kernels;
const Kernels avx512_zen5_kernels = bf16_kernels("avx512_zen5");

}  // namespace diptych
