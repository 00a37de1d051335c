// The selective scan of Mamba (Gu and Dao 2023): each channel has a small state with decays of its own.
//
// Of a token with input x, step d, b and c a channel's numbers h become exp(d a) h + d x b, and its output is h·c of the
// new ones, and x times a factor, times SiLU of its gate. A register of channels is advanced by all rows at once. A
// token's bits do not depend on how a text is cut.
#pragma once

#include "recurrent_kinds.h"
#include "vector_math.h"

namespace diptych {
namespace {

struct ScanWeights {
    const float *decay;             // [numbers, channels], negative: a step times it is the logarithm of what is left
    const float *step_bias, *skip;  // [channels]
    int32_t numbers;                // of a channel's state, 1 .. kMostScanNumbers
    int64_t channels;
};

// Rows of some tokens of one sequence.
struct ScanRows {
    const float *x, *gate, *step;  // [rows, channels] each, steps before their bias and softplus
    int64_t stride, step_stride;   // of x and gate, and of steps
    const float *b, *c;            // [rows, numbers]
    int64_t read_stride;
    int count;
};

// Advances channels begin .. begin + width - 1, a register of them at most. `from` and `to`: [channels, numbers] of the
// sequence before and behind these rows; they may be one. `out` [rows, out_stride].
template <class Value>
void scan_lanes(const ScanWeights &weights, const ScanRows &rows, int64_t begin, int width, const float *from, float *to,
                Value *out, int64_t out_stride) {
    int numbers = weights.numbers;
    auto get = [width](const float *p) { return width == kLanes ? load(p) : load_part(p, width); };
    alignas(64) float state[kMostScanNumbers * kLanes];
    std::memset(state, 0, static_cast<size_t>(numbers) * kLanes * sizeof(float));
    for (int n = 0; n < width; n++) {
        const float *own = from + (begin + n) * numbers;
        for (int m = 0; m < numbers; m++) state[m * kLanes + n] = own[m];
    }
    Lanes bias = get(weights.step_bias + begin), skip = get(weights.skip + begin);
    for (int i = 0; i < rows.count; i++) {
        Lanes x = get(rows.x + i * rows.stride + begin);
        Lanes step = softplus(add(get(rows.step + i * rows.step_stride + begin), bias));
        Lanes added = mul(step, x), sum = splat(0.0f);
        const float *b = rows.b + i * rows.read_stride, *c = rows.c + i * rows.read_stride;
        for (int m = 0; m < numbers; m++) {
            Lanes decay = exp(mul(step, get(weights.decay + m * weights.channels + begin)));
            Lanes h = fma(decay, load(state + m * kLanes), mul(added, splat(b[m])));
            store(state + m * kLanes, h);
            sum = fma(h, splat(c[m]), sum);
        }
        Lanes gate = silu(get(rows.gate + i * rows.stride + begin));
        Lanes made = mul(fma(x, skip, sum), gate);
        Value *place = out + i * out_stride + begin;
        if (width == kLanes) store(place, made);
        else store_part(place, made, width);
    }
    for (int n = 0; n < width; n++) {
        float *own = to + (begin + n) * numbers;
        for (int m = 0; m < numbers; m++) own[m] = state[m * kLanes + n];
    }
}

// The same for channels begin .. end - 1.
template <class Value>
void scan(const ScanWeights &weights, const ScanRows &rows, int64_t begin, int64_t end, const float *from, float *to,
          Value *out, int64_t out_stride) {
    for (int64_t channel = begin; channel < end; channel += kLanes) {
        int width = static_cast<int>(end - channel < kLanes ? end - channel : kLanes);
        scan_lanes(weights, rows, channel, width, from, to, out, out_stride);
    }
}

}  // namespace
}  // namespace diptych
