// The short convolution of LFM2: out(C * conv(B * x)), a filter over the last tokens for each lane.
//
// A row of the first product is B, C and x beside each other.
#pragma once

#include "advance_states.h"
#include "causal_conv.h"

namespace diptych {
namespace {

template <class Kind>
void run_short_conv(StepState &step, const Layer &layer) {
    const RecurrentStep &own = step.recurrent;
    int64_t channels = layer.own.recurrent.channels;
    int taps = layer.own.recurrent.taps;
    const float *filter = layer.recurrent.vector(DIPTYCH_FILTER), *bias = layer.recurrent.vector(DIPTYCH_FILTER_BIAS);
    auto input = [&](int64_t row, int64_t channel, int count) {
        const float *before = own.in_row(row) + channel;
        return mul(load_some(before, count), load_some(before + 2 * channels, count));
    };
    auto done = [&](int64_t row, int64_t channel, int count, Lanes sums) {
        const float *after = own.in_row(row) + channels + channel;
        store_some(own.out_row<Kind>(row) + channel, mul(load_some(after, count), sums), count);
    };
    advance_states(step, layer, conv_slices(channels), [&](const StateRun &run, int64_t slice) {
        convolve_slice(run, 0, channels, taps, slice, filter, bias, input, done);
    });
    step.model->team.barrier();
}

}  // namespace
}  // namespace diptych
