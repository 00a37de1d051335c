// Block tables of layers with a window, where these lie in blocks of their own.
//
// A sequence has `windowed` of them beside its table of all tokens. They begin at a later block: what lies before is out
// of every row's sight, and may be no longer there. A layer finds its table as if it began at block 0.
#pragma once

#include <string>

#include "step_state.h"

namespace diptych {

// Empty if all layers find their keys and values of sequence s, `table` being the first of its windowed tables; else
// what is wrong.
std::string refused_windows(const DiptychModel &model, const DiptychBatch &batch, int32_t s, const int32_t *table);

// Empty if the batch gives every layer a place in a block that there is; else what is wrong.
std::string refused_layer_places(const DiptychModel &model, const DiptychBatch &batch);

// Layers whose keys and values lie in one block.
int32_t block_layers(const DiptychModel &model, const DiptychBatch &batch);

// Numbers of the windowed tables of sequence s.
inline int64_t window_entries(const DiptychBatch &batch, int32_t s) {
    return batch.windowed == 0 ? 0 : static_cast<int64_t>(batch.windowed) * batch.window_lengths[s];
}

// Adds the windowed tables of all sequences behind those of all tokens.
void add_window_tables(StepState &step);

}  // namespace diptych
