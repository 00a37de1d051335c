// Which instruction sets this machine runs.
#include "model.h"

namespace diptych {

extern const Kernels plain_kernels;

#if defined(__x86_64__)

extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512_bf16_kernels;

// The compiler's run-time check also asks whether the operating system saves the registers.
std::vector<const Kernels *> runnable(int32_t) {
    __builtin_cpu_init();
    std::vector<const Kernels *> found;
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back(&avx512_bf16_kernels);
    if (avx512) found.push_back(&avx512_kernels);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2_kernels);
    found.push_back(&plain_kernels);
    return found;
}

#else

std::vector<const Kernels *> runnable(int32_t) { return {&plain_kernels}; }

#endif

}  // namespace diptych
