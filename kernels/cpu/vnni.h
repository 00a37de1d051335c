// vpdpbusd: 64 products of an unsigned and a signed byte an instruction, added to 16 sums of 32 bits, exactly.
#pragma once

#include <immintrin.h>

#include "bf16.h"

namespace diptych {
namespace {

// sum += 16 times four weights x the same four activations. Instructions of our own: GCC 12 copies the sums of the
// intrinsic, and then has too few registers.
[[gnu::always_inline]] inline void add_dots(__m512i &sum, __m512i weights, __m512i same) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(same));
}

[[gnu::always_inline]] inline void add_dots(__m512i &sum, __m512i weights, const int8_t (&four)[4]) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(four));
}

// Two registers of weights x four activations of one row. To repeat these while loading spares an instruction and
// costs a load; with a third of the rows done so a core has neither too many of the one nor of the other.
[[gnu::always_inline]] inline void add_line(__m512i (&dot)[2], __m512i left, __m512i right, int row, const int8_t *x) {
    const auto &four = *reinterpret_cast<const int8_t(*)[4]>(x);
    if (row % 3 == 0) {
        add_dots(dot[0], left, four);
        add_dots(dot[1], right, four);
    } else {
        __m512i same = same_four(four);
        add_dots(dot[0], left, same);
        add_dots(dot[1], right, same);
    }
}

}  // namespace
}  // namespace diptych
