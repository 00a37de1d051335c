// The state space of Mamba-2 (Dao and Gu 2024): a matrix for each head that forgets and is added to.
//
// Of a token with input x, step d and its group's b and c a state h [head_dim, numbers] becomes exp(d a) h + d x b, and
// the token's output is h·c of the new one, and x times a factor. A few channels are advanced by many tokens while they
// lie in the first cache. A token's bits do not depend on how a text is cut.
#pragma once

#include <type_traits>

#include "vector_math.h"

namespace diptych {
namespace {

// Channels of a head that go together, and rows whose steps are made at once.
constexpr int kSpaceChannels = 4;
constexpr int kSpaceRows = 64;

// Order of the outputs' norm and their gate.
enum SpaceNorm : int32_t { kNoNorm = 0, kAfterGate = 1, kBeforeGate = 2 };

struct SpaceSizes {
    int32_t heads, head_dim, groups;
    int32_t numbers;  // of a channel's state
    int32_t norm;     // SpaceNorm
    float least_step, largest_step;
    float epsilon;  // of the norm

    int64_t width() const { return int64_t{heads} * head_dim; }
    int64_t channels() const { return width() + 2 * int64_t{groups} * numbers; }
};

struct SpaceWeights {
    const float *decay;             // [heads], negative: a step times it is the logarithm of what is left
    const float *step_bias, *skip;  // [heads]
    const float *norm;              // [width], or null
};

// What is made of some tokens of one sequence: rows with gates, inputs behind their convolution (x, then b and c of all
// groups) and steps.
struct SpaceRows {
    float *first;
    int64_t stride;
    int64_t gate, inner, step;  // places in a row
    int count;

    float *row(int i) const { return first + i * stride; }
};

// Steps of some rows of a head, and what is left of a state after them.
struct SpaceSteps {
    float step[kSpaceRows], decay[kSpaceRows];
};

// Advances some channels of a head, from `channel` on, by `count` rows, and puts the outputs in place of x.
template <int Channels>
void advance_channels(const SpaceSizes &sizes, float *x, const float *b, const float *c, int64_t stride,
                      const SpaceSteps &steps, int count, float skip, const float *from, float *to) {
    int64_t numbers = sizes.numbers;
    for (int i = 0; i < count; i++, x += stride, b += stride, c += stride) {
        Lanes decay = splat(steps.decay[i]), added[Channels], sum[Channels];
#pragma GCC unroll 4
        for (int n = 0; n < Channels; n++) added[n] = splat(x[n] * steps.step[i]), sum[n] = splat(0.0f);
        by_lanes(
            sizes.numbers,
            [&](int m) {
                Lanes own_b = load(b + m), own_c = load(c + m);
#pragma GCC unroll 4
                for (int n = 0; n < Channels; n++) {
                    Lanes h = fma(added[n], own_b, mul(decay, load(from + n * numbers + m)));
                    store(to + n * numbers + m, h);
                    sum[n] = fma(h, own_c, sum[n]);
                }
            },
            [&](int m, int rest) {
                Lanes own_b = load_part(b + m, rest), own_c = load_part(c + m, rest);
                for (int n = 0; n < Channels; n++) {
                    Lanes h = fma(added[n], own_b, mul(decay, load_part(from + n * numbers + m, rest)));
                    store_part(to + n * numbers + m, h, rest);
                    sum[n] = fma(h, own_c, sum[n]);
                }
            });
        for (int n = 0; n < Channels; n++) x[n] = sum_of(sum[n]) + x[n] * skip;
        from = to;
    }
}

// Makes the steps of rows begin .. begin + count - 1.
inline void ready_steps(const SpaceSizes &sizes, const SpaceWeights &weights, const SpaceRows &rows, int32_t head,
                        int begin, int count, SpaceSteps &to) {
    for (int i = 0; i < count; i++) {
        float made = first_of(softplus(splat(rows.row(begin + i)[rows.step + head] + weights.step_bias[head])));
        // NaN stays NaN.
        made = made < sizes.least_step ? sizes.least_step : made > sizes.largest_step ? sizes.largest_step : made;
        to.step[i] = made;
        to.decay[i] = first_of(exp(splat(weights.decay[head] * made)));
    }
}

// Advances the state of one head. `from` and `to`: [heads, head_dim, numbers] of the sequence before and behind these
// rows; they may be one. The head's x become its outputs.
inline void advance_space(const SpaceSizes &sizes, const SpaceWeights &weights, const SpaceRows &rows, int32_t head,
                          const float *from, float *to) {
    int32_t group = head / (sizes.heads / sizes.groups);
    int64_t state = int64_t{sizes.head_dim} * sizes.numbers, kept = int64_t{sizes.groups} * sizes.numbers;
    int64_t b = sizes.width() + int64_t{group} * sizes.numbers;
    to += head * state;
    from += head * state;
    SpaceSteps steps;
    for (int begin = 0; begin < rows.count; begin += kSpaceRows) {
        int count = rows.count - begin < kSpaceRows ? rows.count - begin : kSpaceRows;
        ready_steps(sizes, weights, rows, head, begin, count, steps);
        float *inner = rows.row(begin) + rows.inner, *x = inner + int64_t{head} * sizes.head_dim;
        int32_t n = 0;
        auto advance = [&](auto channels) {
            advance_channels<channels()>(sizes, x + n, inner + b, inner + b + kept, rows.stride, steps, count,
                                         weights.skip[head], from + n * sizes.numbers, to + n * sizes.numbers);
        };
        for (; n + kSpaceChannels <= sizes.head_dim; n += kSpaceChannels) {
            advance(std::integral_constant<int, kSpaceChannels>());
        }
        for (; n < sizes.head_dim; n++) advance(std::integral_constant<int, 1>());
        from = to;
    }
}

// to = x * silu(gate); `to` may be x.
template <class Value>
void multiply_by_gate(const float *x, const float *gate, int n, Value *to) {
    by_lanes(
        n, [&](int i) { store(to + i, mul(load(x + i), silu(load(gate + i)))); },
        [&](int i, int rest) {
            store_part(to + i, mul(load_part(x + i, rest), silu(load_part(gate + i, rest))), rest);
        });
}

// Norms and gates the outputs of all heads of one row. What stands in their places is used up.
template <class Value>
void gate_space(const SpaceSizes &sizes, const SpaceWeights &weights, const SpaceRows &rows, int row, Value *to) {
    float *x = rows.row(row) + rows.inner;
    const float *gate = rows.row(row) + rows.gate;
    int width = static_cast<int>(sizes.width()), part = width / sizes.groups;
    if (sizes.norm == kNoNorm) return multiply_by_gate(x, gate, width, to);
    if (sizes.norm == kAfterGate) multiply_by_gate(x, gate, width, x);
    for (int begin = 0; begin < width; begin += part) {
        if (sizes.norm == kAfterGate) {
            rms_norm(x + begin, weights.norm + begin, part, sizes.epsilon, to + begin);
        } else {
            rms_norm(x + begin, weights.norm + begin, part, sizes.epsilon, x + begin);
        }
    }
    if (sizes.norm == kBeforeGate) multiply_by_gate(x, gate, width, to);
}

}  // namespace
}  // namespace diptych
