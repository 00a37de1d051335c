// Weights come from memory, in order, and the hardware's own fetching stops at page borders. When a kernel asks for
// them ahead of time itself: what is faster was measured, and differs by kernel, rows and CPU.
#pragma once

#include <cstdint>
#include <type_traits>

namespace diptych {

// This CPU's own fetching does not keep up with a kernel that computes more than a little on what it reads. True of a
// Zen 5: a step of one row in codes took 3.6 ms on a core and takes 2.7, and 2.4 -> 2.1 on two (dispatch.cpp).
extern const bool hardware_fetches_late;

namespace {

// Ahead: in bytes; Locality: 3 for the first cache, 2 for the second.
template <int Ahead, int Locality>
inline void fetch(const void *weights) {
    __builtin_prefetch(static_cast<const char *>(weights) + Ahead, 0, Locality);
    __builtin_prefetch(static_cast<const char *>(weights) + Ahead + 64, 0, Locality);
}

// Rows of a tile with which the hardware's own fetching is faster, as long as nothing is read out of order. With more
// the core computes for too long to see far enough ahead itself.
constexpr int kFewRows = 4;
constexpr int kFewRowsLate = 2;  // where the hardware fetches late

// Calls f(whether it is to fetch, known when compiled) for a tile of so many rows: never of up to `Least`, of up to
// `Few` where the hardware fetches late, always of more.
template <int Rows, int Few, int Least, class F>
[[gnu::always_inline]] inline void with_fetching(F f) {
    if constexpr (Rows > Few) {
        f(std::true_type());
    } else if constexpr (Rows <= Least) {
        f(std::false_type());
    } else if (hardware_fetches_late) {
        f(std::true_type());
    } else {
        f(std::false_type());
    }
}

}  // namespace
}  // namespace diptych
