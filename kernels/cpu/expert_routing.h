// Which experts a row passes, and with what weights.
#pragma once

#include <cstdint>

#include "abi.h"

namespace diptych {

// Groups of experts that a router may have: as many as there are bits in a word.
constexpr int32_t kMostExpertGroups = 64;

// Picks a row's experts: `picked` [picked] in ascending order, with `weights`. `logits` [count] become scores.
// `correction` [count] is added for picking, or null. The greatest are picked, of equal ones the first; a row with a
// logit that is not a number has the first experts and weights that are no numbers, so that no other row notices.
void pick_experts(const DiptychExperts &experts, float *logits, const float *correction, int32_t *picked,
                  float *weights);

}  // namespace diptych
