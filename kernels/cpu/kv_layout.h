// How the keys, or the values, of one head lie in one block (kernels/int8_cache.py).
#pragma once

#include <cstdint>

#include "abi.h"
#include "bf16.h"

namespace diptych {

// Whether numbers of this type have a scale for each token and head.
template <class Kept>
constexpr bool kHasScales = false;
template <>
constexpr bool kHasScales<int8_t> = true;

// Bytes of the scales behind one head's int8: fp32 [block_size], at a multiple of 4.
inline int64_t scale_bytes(int64_t block_size) { return static_cast<int64_t>(sizeof(float)) * block_size; }

// Elements of one head's keys, or values, in one block; of int8 these are bytes.
inline int64_t head_elements(int32_t kept, int64_t head_dim, int64_t block_size) {
    int64_t numbers = head_dim * block_size;
    return kept == DIPTYCH_KV_INT8 ? round_up(numbers, sizeof(float)) + scale_bytes(block_size) : numbers;
}

}  // namespace diptych
