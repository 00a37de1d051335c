// Trees of tokens: rows of one sequence of which each follows another one, not always the one before it.
#pragma once

#include <cstdint>
#include <string>

#include "step_state.h"

namespace diptych {

// Empty if the parents of a sequence's tokens are none, or make a tree; else what is wrong. `first`: its first token.
std::string refused_tree(const DiptychBatch &batch, int32_t s, int64_t first);

// Sets positions and paths of a sequence's rows, `first` on; whether they are a tree and no chain.
bool lay_tree(StepState &step, int32_t s, int32_t first);

}  // namespace diptych
