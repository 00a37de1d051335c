// Pages of recurrent states in the blocks of a pool; recurrent_step.h says when they are read and written.
#pragma once

#include <string>

#include "step_state.h"

namespace diptych {

// Empty if sequence s has the pages that it reads and writes, or the model none; else what is wrong.
std::string refused_pages(const DiptychModel &model, const DiptychBatch &batch, int32_t s);

// The same for what all sequences have in common.
std::string refused_page_blocks(const DiptychModel &model, const DiptychBatch &batch);

// Cuts the rows of a step into runs, gives these room, and finds the sequences whose states are not those before them.
// Throws std::bad_alloc.
void prepare_states(StepState &step);

// By all ranks: phases with their barriers.
void read_states(StepState &step);
void write_states(StepState &step);

}  // namespace diptych
