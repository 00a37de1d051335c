// Which instruction sets this machine runs.
#include "model.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace diptych {

extern const Kernels plain_kernels;

#if defined(__x86_64__)

extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512_vnni_kernels;
extern const Kernels avx512_bf16_kernels;
extern const Kernels avx512_zen5_kernels;
extern const Kernels amx_kernels;

namespace {

// The CPU has tiles of bf16, and Linux (5.16 or later) lets this process use them: they must be asked for,
// once, because they make the saved state of a thread 8 KiB larger.
bool have_amx() {
#if defined(__linux__)
    constexpr unsigned kTiles = 1u << 24, kTilesOfBf16 = 1u << 22;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a, b, c, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if ((d & kTiles) == 0 || (d & kTilesOfBf16) == 0) return false;
    static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return permitted;
#else
    return false;
#endif
}

// AMD's family 1Ah.
bool is_zen5() {
    constexpr unsigned kFamily = 0xf, kExtended = 0xff;
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || c != signature_AMD_ecx) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
    return (a >> 8 & kFamily) + (a >> 20 & kExtended) == 0x1a;
}

// Best first, whatever they compute. The compiler's run-time check also asks whether the operating system saves
// the registers.
std::vector<const Kernels *> runnable() {
    __builtin_cpu_init();
    std::vector<const Kernels *> found;
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    bool bytes = avx512 && __builtin_cpu_supports("avx512vnni");
    bool pairs = bytes && __builtin_cpu_supports("avx512bf16");
    if (pairs && have_amx()) found.push_back(&amx_kernels);
    if (pairs) {
        found.push_back(&avx512_bf16_kernels);
        found.insert(is_zen5() ? found.end() - 1 : found.end(), &avx512_zen5_kernels);
    }
    if (bytes) found.push_back(&avx512_vnni_kernels);
    if (avx512) found.push_back(&avx512_kernels);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        found.push_back(&avx2_kernels);
    }
    found.push_back(&plain_kernels);
    return found;
}

}  // namespace

#else

namespace {

std::vector<const Kernels *> runnable() { return {&plain_kernels}; }

}  // namespace

#endif

std::vector<const Kernels *> runnable(int32_t dtype) {
    std::vector<const Kernels *> found;
    if (dtype < DIPTYCH_FP32 || dtype > DIPTYCH_BYTES) return found;
    for (const Kernels *kernels : runnable()) {
        if (kernels->body[dtype] != nullptr) found.push_back(kernels);
    }
    return found;
}

}  // namespace diptych
