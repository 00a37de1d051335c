// The likeliest token of a row of logits, while these are in the cache: for rows that are sampled greedily, so that
// no pass has to read all of them again.
//
// Numbers are compared as whole ones in the same order, -0 as 0, so that what compilers may not reorder for floats
// becomes a few instructions a register. Of equal ones the first is likeliest.
#pragma once

#include <cstring>
#include <limits>

#include "bf16.h"

namespace diptych {

// Above all numbers: stands for a block with an infinity or a NaN.
constexpr int32_t kNotFinite = std::numeric_limits<int32_t>::max();

// The greatest number of a block of columns, as a key, and which column of it has it.
struct Peak {
    int32_t key;
    int32_t column;
};

static inline int32_t key_of(float number) {
    number += 0.0f;  // -0 becomes 0
    int32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits ^ ((bits >> 31) & std::numeric_limits<int32_t>::max());
}

// Of the first `count` of 32 numbers.
static inline Peak peak_of_block(const float *numbers, int count) {
    constexpr int32_t least = std::numeric_limits<int32_t>::min();
    constexpr int32_t infinity = 0x7f800000;
    int32_t keys[kColumns], best = least, bad = 0, column = kColumns;
    for (int j = 0; j < kColumns; j++) keys[j] = j < count ? key_of(numbers[j]) : least;
    for (int j = 0; j < kColumns; j++) {
        best = keys[j] > best ? keys[j] : best;
        // Below the key of -infinity are NaNs with a sign, and what fills the block up.
        bad |= j < count && (keys[j] >= infinity || keys[j] <= ~infinity) ? 1 : 0;
    }
    for (int j = 0; j < kColumns; j++) {
        int32_t here = keys[j] == best ? j : kColumns;
        column = here < column ? here : column;
    }
    return {bad != 0 ? kNotFinite : best, column};
}

// The column of the greatest number of all blocks, -1 if one of them is not finite.
static inline int32_t likeliest(const Peak *peaks, int32_t blocks) {
    int32_t best = 0;
    for (int32_t b = 1; b < blocks; b++) {
        if (peaks[b].key > peaks[best].key) best = b;
    }
    return peaks[best].key == kNotFinite ? -1 : best * kColumns + peaks[best].column;
}

}  // namespace diptych
