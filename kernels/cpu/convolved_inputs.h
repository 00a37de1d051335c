// The convolution before a recurrence: SiLU of it takes the place of its inputs.
#pragma once

#include "advance_states.h"
#include "causal_conv.h"

namespace diptych {
namespace {

// `begin`: where the convolution's channels begin in a row of RecurrentStep::in. Its state is the first of a layer's. Calls
// kept(row, channel, count, values) for what it writes.
template <class Kept>
void convolve_inputs(StepState &step, const Layer &layer, int64_t begin, Kept kept) {
    const RecurrentStep &own = step.recurrent;
    const DiptychRecurrent &shape = layer.own.recurrent;
    const float *filter = layer.recurrent.vector(DIPTYCH_FILTER), *bias = layer.recurrent.vector(DIPTYCH_FILTER_BIAS);
    auto place = [&](int64_t row, int64_t channel) { return own.in_row(row) + begin + channel; };
    auto input = [&](int64_t row, int64_t channel, int count) { return load_some(place(row, channel), count); };
    auto done = [&](int64_t row, int64_t channel, int count, Lanes sums) {
        Lanes value = silu(sums);
        store_some(place(row, channel), value, count);
        kept(row, channel, count, value);
    };
    advance_states(step, layer, conv_slices(shape.channels), [&](const StateRun &run, int64_t slice) {
        convolve_slice(run, 0, shape.channels, shape.taps, slice, filter, bias, input, done);
    });
    step.model->team.barrier();
}

// Where the states behind the convolution's begin in a layer's.
inline int64_t behind_filter(const Layer &layer) {
    return int64_t{layer.own.recurrent.taps - 1} * layer.own.recurrent.channels;
}

}  // namespace
}  // namespace diptych
