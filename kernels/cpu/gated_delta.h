// The layer of the gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid; Yang et al. 2024):
//
//   convolution | matrices of the heads, by heads of keys, with their norm and gate
//
// A row of the first product is queries, keys, values and gates; rates and steps come beside it in fp32.
#pragma once

#include "convolved_inputs.h"
#include "delta_rule.h"

namespace diptych {
namespace {

template <class Kind>
void run_gated_delta(StepState &step, const Layer &layer) {
    const RecurrentStep &own = step.recurrent;
    const DiptychRecurrent &shape = layer.own.recurrent;
    DeltaSizes sizes{shape.groups, shape.heads, shape.state, shape.width, shape.largest_rate, shape.epsilon};
    DeltaWeights weights{layer.recurrent.vector(DIPTYCH_DECAY), layer.recurrent.vector(DIPTYCH_STEP_BIAS),
                         layer.recurrent.vector(DIPTYCH_RECURRENT_NORM)};
    convolve_inputs(step, layer, 0, [](int64_t, int64_t, int, Lanes) {});
    int64_t matrices = behind_filter(layer), side = side_begin(layer);
    advance_states(step, layer, sizes.key_heads, [&](const StateRun &run, int64_t key_head) {
        DeltaRows rows{own.in_row(run.first), own.in_stride, sizes.channels(), side, side + sizes.value_heads,
                       static_cast<int>(run.rows)};
        advance_delta(sizes, weights, rows, static_cast<int32_t>(key_head), run.from + matrices, run.to + matrices,
                      own.out_row<Kind>(run.first), own.out_stride);
    });
    step.model->team.barrier();
}

}  // namespace
}  // namespace diptych
