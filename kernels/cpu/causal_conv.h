// Causal convolution of each channel by itself, over a token and the few before it.
//
// A sequence's state is its last taps - 1 inputs, fp32 [taps - 1, channels], the oldest first. Taps are added oldest first,
// row by row: a row has the same bits however a text is cut.
#pragma once

#include "recurrent_kinds.h"
#include "step_state.h"
#include "vector_math.h"

namespace diptych {
namespace {

// Channels of a slice: those that one rank convolves at once.
constexpr int kConvSlice = 128;

inline int64_t conv_slices(int64_t channels) { return (channels + kConvSlice - 1) / kConvSlice; }

// Numbers p[0 .. count - 1], at most kLanes; what is left is zero.
inline Lanes load_some(const float *p, int count) { return count == kLanes ? load(p) : load_part(p, count); }
template <class Out>
inline void store_some(Out *p, Lanes v, int count) {
    count == kLanes ? store(p, v) : store_part(p, v, count);
}

// Convolves slice number `slice` of `channels` channels, for the rows of a run. `seen` [taps - 1, channels] lies at the
// same place in the states before and behind it. `filter` [taps, channels]; `bias` [channels], or null.
//
// Calls input(row, channel, count) for each row of the step and register of channels, and then done(row, channel, count,
// sums), which may write where the input was.
template <class Input, class Done>
void convolve_slice(const StateRun &run, int64_t seen, int64_t channels, int taps, int64_t slice, const float *filter,
                    const float *bias, Input input, Done done) {
    float window[kMostTaps][kConvSlice];  // input i of the slice, the first one seen being 0, in row i % taps
    int64_t first = slice * kConvSlice, width = std::min<int64_t>(kConvSlice, channels - first);
    auto bytes = static_cast<size_t>(width) * sizeof(float);
    for (int i = 0; i + 1 < taps; i++) std::memcpy(window[i], run.from + seen + i * channels + first, bytes);
    for (int64_t row = 0; row < run.rows; row++) {
        int oldest = static_cast<int>(row % taps), newest = static_cast<int>((row + taps - 1) % taps);
        for (int c = 0; c < width; c += kLanes) {
            int count = static_cast<int>(std::min<int64_t>(kLanes, width - c));
            int64_t channel = first + c;
            store_some(window[newest] + c, input(run.first + row, channel, count), count);
            Lanes sums = splat(0.0f);
            for (int tap = 0, at = oldest; tap < taps; tap++, at = at + 1 == taps ? 0 : at + 1) {
                sums = fma(load_some(window[at] + c, count), load_some(filter + tap * channels + channel, count), sums);
            }
            if (bias != nullptr) sums = add(sums, load_some(bias + channel, count));
            done(run.first + row, channel, count, sums);
        }
    }
    for (int i = 0; i + 1 < taps; i++) {
        std::memcpy(run.to + seen + i * channels + first, window[(run.rows + i) % taps], bytes);
    }
}

}  // namespace
}  // namespace diptych
