// What a feed-forward does with the sums of its first product, 32 columns at a time.
#pragma once

#include "model.h"
#include "vector_math.h"

namespace diptych {
namespace {

constexpr float kClampedSlope = 1.702f;  // of the sigmoid of DIPTYCH_CLAMPED_SWIGLU

inline Lanes gelu(Lanes x) {
    Lanes half = mul(splat(0.5f), x);
    return fma(half, erf(mul(x, splat(0.70710678118654752f))), half);
}

// 0.5 x (1 + tanh(y)) is x / (1 + e^-2y).
inline Lanes gelu_tanh(Lanes x) {
    Lanes y = mul(splat(0.79788456080286536f), fma(mul(mul(splat(0.044715f), x), x), x, x));
    return div(x, add(splat(1.0f), exp(mul(splat(-2.0f), y))));
}

inline Lanes relu_squared(Lanes x) {
    Lanes positive = max(splat(0.0f), x);
    return mul(positive, positive);
}

// to = act(gates, ups) of 16 columns each or, without gates, act(sums, 1) of 32.
template <class Act, class Value>
inline void act_on_columns(const float *sums, bool gated, Value *to, Act act) {
    if (gated) {
        for (int j = 0; j < kGateColumns; j += kLanes) store(to + j, act(load(sums + j), load(sums + kGateColumns + j)));
    } else {
        for (int j = 0; j < kColumns; j += kLanes) store(to + j, act(load(sums + j), splat(1.0f)));
    }
}

// All but the usual one.
template <class Value>
[[gnu::noinline]] void other_activation(const DiptychShape &shape, const float *sums, Value *to) {
    bool gated = shape.gated != 0;
    switch (shape.activation) {
        case DIPTYCH_GELU: return act_on_columns(sums, gated, to, [](Lanes g, Lanes u) { return mul(gelu(g), u); });
        case DIPTYCH_GELU_TANH:
            return act_on_columns(sums, gated, to, [](Lanes g, Lanes u) { return mul(gelu_tanh(g), u); });
        case DIPTYCH_RELU_SQUARED:
            return act_on_columns(sums, gated, to, [](Lanes g, Lanes u) { return mul(relu_squared(g), u); });
        case DIPTYCH_CLAMPED_SWIGLU:
            return act_on_columns(sums, gated, to, [c = shape.clamp](Lanes g, Lanes u) {
                Lanes gate = min(splat(c), g), up = max(splat(-c), min(splat(c), u));
                Lanes slope = exp(mul(splat(-kClampedSlope), gate));
                return mul(div(gate, add(splat(1.0f), slope)), add(up, splat(1.0f)));
            });
        default: return act_on_columns(sums, gated, to, [](Lanes g, Lanes u) { return mul(silu(g), u); });
    }
}

// Two columns of the first product become one number of the next one's input, or one: the bits by which to shift a
// number of columns. A division by what is known at run time cost 3% of a prompt's step.
inline int halvings(const DiptychShape &shape) { return shape.gated ? 1 : 0; }

inline bool is_silu_gated(const DiptychShape &shape) { return shape.activation == DIPTYCH_SILU && shape.gated != 0; }

// `sums`: of 16 gates and 16 ups, or of 32 columns without gates. `to`: their numbers. `usual`: is_silu_gated(shape),
// which is asked once for a product and not for every row of a block.
template <class Value>
inline void activate(const DiptychShape &shape, bool usual, const float *sums, Value *to) {
    if (!usual) return other_activation(shape, sums, to);
    for (int j = 0; j < kGateColumns; j += kLanes) {
        store(to + j, mul(silu(load(sums + j)), load(sums + kGateColumns + j)));
    }
}

}  // namespace
}  // namespace diptych
