// The gate of what attention gives (Qwen3-Next): a sigmoid of a product of its input, for each lane.
#pragma once

#include "row_groups.h"
#include "vector_math.h"

namespace diptych {
namespace {

// Multiplies what attention left for the rows of a set. Gates come after queries, keys and values.
template <class Kind>
void gate_attention(StepState &step, const RowSet &set) {
    const DiptychModel &model = *step.model;
    if (!model.shape.attention_gate) return;
    int width = model.query_width();
    share_rows(step, RowGroups(step, set.size(), Kind::kRows), 1, [&](int64_t place) {
        auto *mixed = static_cast<typename Kind::Value *>(step.mixed.get()) + place * step.mixed_stride;
        const float *gate = step.qkv_row(set.row(place)) + model.query_width() + 2 * model.kv_width();
        by_lanes(
            width, [&](int i) { store(mixed + i, mul(load(mixed + i), sigmoid(load(gate + i)))); },
            [&](int i, int rest) {
                store_part(mixed + i, mul(load_part(mixed + i, rest), sigmoid(load_part(gate + i, rest))), rest);
            });
    });
    step.model->team.barrier();
}

}  // namespace
}  // namespace diptych
