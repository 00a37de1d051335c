// The layer of Mamba-2 (Granite 4 H, Bamba, Falcon-H1, Nemotron-H; Dao and Gu 2024):
//
//   convolution | states of the heads | norm and gate of each row
//
// A row of the first product is gates, the convolution's channels (x, b and c) and steps.
#pragma once

#include "convolved_inputs.h"
#include "state_space.h"

namespace diptych {
namespace {

template <class Kind>
void run_mamba2(StepState &step, const Layer &layer) {
    const RecurrentStep &own = step.recurrent;
    const DiptychRecurrent &shape = layer.own.recurrent;
    SpaceSizes sizes{shape.heads, shape.width,      shape.groups,       shape.state,
                     shape.norm,  shape.least_step, shape.largest_step, shape.epsilon};
    SpaceWeights weights{layer.recurrent.vector(DIPTYCH_DECAY), layer.recurrent.vector(DIPTYCH_STEP_BIAS),
                         layer.recurrent.vector(DIPTYCH_SKIP), layer.recurrent.vector(DIPTYCH_RECURRENT_NORM)};
    convolve_inputs(step, layer, sizes.width(), [](int64_t, int64_t, int, Lanes) {});
    int64_t matrices = behind_filter(layer), steps = sizes.width() + sizes.channels();
    auto rows_of = [&](int64_t first, int64_t count) {
        return SpaceRows{own.in_row(first), own.in_stride, 0, sizes.width(), steps, static_cast<int>(count)};
    };
    advance_states(step, layer, sizes.heads, [&](const StateRun &run, int64_t head) {
        advance_space(sizes, weights, rows_of(run.first, run.rows), static_cast<int32_t>(head), run.from + matrices,
                      run.to + matrices);
    });
    step.model->team.barrier();
    RowGroups groups(step, static_cast<int64_t>(step.rows.size()), Kind::kRows);
    share_rows(step, groups, 1, [&](int64_t row) {
        gate_space(sizes, weights, rows_of(row, 1), 0, own.out_row<Kind>(row));
    });
    step.model->team.barrier();
}

}  // namespace
}  // namespace diptych
