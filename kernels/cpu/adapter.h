// A LoRA adapter as steps read it, and the rows of a step that have one.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "abi.h"
#include "weight_memory.h"

namespace diptych {

// Columns whose part of B lies together.
constexpr int kAdapterStrip = 16;
// Rows of one adapter that read A together.
constexpr int kAdapterRows = 4;

// Neighbours in the order of a set's adapted rows, all of one adapter.
struct AdapterTile {
    const DiptychAdapter *adapter;
    int32_t first, rows;
};

struct StepState;

// What is wrong with the slots that a batch names; empty if nothing is.
std::string refused_adapters(const DiptychModel &model, const DiptychBatch &batch);

// What is wrong with a change of an adapter for this model; empty if nothing is. Its arrays are not read.
std::string refused_change(const DiptychModel &model, const DiptychChange &change);

// Copies a change that was not refused into an adapter. Changes lie in memory as they are added.
void add_change(DiptychAdapter &adapter, const DiptychModel &model, const DiptychChange &change);

// Finds the adapter of each row of a step whose rows are known, and room for what lies between A and B.
void prepare_adapters(StepState &step);

}  // namespace diptych

// The changes of one layer by DiptychLinear, without `a` where there is none.
using LayerChanges = std::array<DiptychChange, DIPTYCH_RECURRENT_OUT + 1>;

// The changes of all layers: [layer][own part].
struct DiptychAdapter {
    DiptychAdapter(int32_t layers, int32_t parts)
        : own_parts(parts), changes(static_cast<size_t>(layers) * static_cast<size_t>(parts)) {}

    LayerChanges &of(int32_t layer, int32_t part) {
        return changes[static_cast<size_t>(layer) * static_cast<size_t>(own_parts) + static_cast<size_t>(part)];
    }

    int32_t own_parts;  // of the rank that it is for; 1 where one process computes the model
    std::vector<LayerChanges> changes;
    int32_t most_ranks = 0;  // of a change, all its parts
    diptych::WeightMemory memory;
};

namespace diptych {

// Which of an adapter's changes belongs to a product; null: none of them.
inline const DiptychChange *find_change(const DiptychAdapter &adapter, int32_t layer, int32_t part, int32_t which) {
    size_t place = static_cast<size_t>(layer) * static_cast<size_t>(adapter.own_parts) + static_cast<size_t>(part);
    const DiptychChange &change = adapter.changes[place][static_cast<size_t>(which)];
    return change.a == nullptr ? nullptr : &change;
}

}  // namespace diptych
