// How a thread waits before it sleeps.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace diptych {

// About 10 µs of looking (a pause is some 40 ns), then about as long of offering the core to others. A barrier
// between balanced phases opens within a microsecond when both cores are ours.
constexpr int kSpins = 256;
constexpr int kYields = 32;

static inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace diptych
