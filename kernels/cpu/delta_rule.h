// The gated delta rule (Yang et al. 2024): a head's matrix forgets, and is corrected by each token.
//
// Of a token with key k, value v, decay a and rate b a matrix M [key_dim, value_dim] becomes a M + k (b (v - a k·M)), and
// the token's output is q·M of the new one. Columns of a matrix do not read each other: a few registers of them are
// advanced by many tokens while they lie in the first cache, in one pass a token, which gives its output and what the
// next token reads. A token's bits do not depend on how a text is cut, nor on how many columns go together.
#pragma once

#include <type_traits>

#include "vector_math.h"

namespace diptych {
namespace {

constexpr float kUnitEpsilon = 1e-6f;  // added to the square of a key's or query's length

// Registers of columns that go together: of many tokens, and of one, which reads and writes all of a matrix once.
constexpr int kDeltaRegisters = 2;
constexpr int kDeltaWideRegisters = kLanes >= 16 ? 8 : 4;

struct DeltaSizes {
    int32_t key_heads, value_heads;  // each head of keys serves some of values in a row
    int32_t key_dim, value_dim;
    float largest_rate;
    float epsilon;  // of the outputs' norm

    int32_t share() const { return value_heads / key_heads; }
    int64_t keys() const { return int64_t{key_heads} * key_dim; }
    int64_t values() const { return int64_t{value_heads} * value_dim; }
    int64_t channels() const { return 2 * keys() + values(); }
};

struct DeltaWeights {
    const float *decay;      // [value_heads], negative: a step times it is the logarithm of what is left
    const float *step_bias;  // [value_heads]
    const float *norm;       // [value_dim]
};

// What is made of some tokens of one sequence: rows of queries, keys and values behind their convolution, and elsewhere
// in them gates, rates and steps.
struct DeltaRows {
    float *first;
    int64_t stride;
    int64_t gate, rate, step;  // places in a row
    int count;

    float *row(int i) const { return first + i * stride; }
};

// Places of one head's numbers.
struct DeltaHead {
    int64_t query, key, value;
    int64_t rate, step;  // once they are readied, the rate and the decay
};

// Advances `Registers` registers of columns, or the first `rest` numbers of one where they are not whole.
template <int Registers, bool Whole>
void advance_columns(const DeltaSizes &sizes, const DeltaRows &rows, const DeltaHead &head, int64_t column, int rest,
                     const float *from, float *to) {
    static_assert(Whole || Registers == 1, "a part of one register");
    auto get = [rest](const float *p) { return Whole ? load(p) : load_part(p, rest); };
    auto put = [rest](float *p, Lanes v) { return Whole ? store(p, v) : store_part(p, v, rest); };
    int64_t width = sizes.value_dim;
    Lanes read[Registers], sum[Registers], correction[Registers];
    const float *key = rows.row(0) + head.key;
    for (int j = 0; j < Registers; j++) read[j] = splat(0.0f);
    for (int32_t d = 0; d < sizes.key_dim; d++) {
        const float *old = from + d * width + column;
#pragma GCC unroll 8
        for (int j = 0; j < Registers; j++) read[j] = fma(splat(key[d]), get(old + j * kLanes), read[j]);
    }
    for (int i = 0; i < rows.count; i++) {
        float *row = rows.row(i), *value = row + head.value + column;
        Lanes decay = splat(row[head.step]), rate = splat(row[head.rate]);
        for (int j = 0; j < Registers; j++) {
            correction[j] = mul(rate, sub(get(value + j * kLanes), mul(decay, read[j])));
            read[j] = sum[j] = splat(0.0f);
        }
        const float *query = row + head.query, *next = rows.row(i + 1 < rows.count ? i + 1 : i) + head.key;
        key = row + head.key;
        for (int32_t d = 0; d < sizes.key_dim; d++) {
            const float *old = from + d * width + column;
            float *place = to + d * width + column;
            Lanes k = splat(key[d]), q = splat(query[d]), n = splat(next[d]);
#pragma GCC unroll 8
            for (int j = 0; j < Registers; j++) {
                Lanes m = fma(k, correction[j], mul(decay, get(old + j * kLanes)));
                put(place + j * kLanes, m);
                sum[j] = fma(q, m, sum[j]);
                read[j] = fma(n, m, read[j]);
            }
        }
        for (int j = 0; j < Registers; j++) put(value + j * kLanes, sum[j]);
        from = to;
    }
}

// Advances a head's matrix by all rows, whose values become outputs. `to` may be `from`.
inline void advance_matrix(const DeltaSizes &sizes, const DeltaRows &rows, const DeltaHead &head, const float *from,
                           float *to) {
    int64_t column = 0, width = sizes.value_dim;
    [[maybe_unused]] auto stretch = [&](auto registers) {
        constexpr int kWidth = registers() * kLanes;
        for (; column + kWidth <= width; column += kWidth) {
            advance_columns<registers(), true>(sizes, rows, head, column, kLanes, from, to);
        }
    };
    if (rows.count == 1) stretch(std::integral_constant<int, kDeltaWideRegisters>());
    stretch(std::integral_constant<int, kDeltaRegisters>());
    stretch(std::integral_constant<int, 1>());
    if (column < width) {
        advance_columns<1, false>(sizes, rows, head, column, static_cast<int>(width - column), from, to);
    }
}

// Divides a row of n numbers by its length, and multiplies it.
inline void scale_to_length(float *x, int n, float factor) {
    Lanes squares = splat(0.0f);
    auto add_squares = [&](Lanes v) { squares = fma(v, v, squares); };
    by_lanes(n, [&](int i) { add_squares(load(x + i)); }, [&](int i, int rest) { add_squares(load_part(x + i, rest)); });
    Lanes scale = splat(factor / std::sqrt(sum_of(squares) + kUnitEpsilon));
    by_lanes(
        n, [&](int i) { store(x + i, mul(load(x + i), scale)); },
        [&](int i, int rest) { store_part(x + i, mul(load_part(x + i, rest), scale), rest); });
}

// Makes a head's rate and decay of what stands in their places.
inline void ready_rates(const DeltaSizes &sizes, const DeltaWeights &weights, int32_t head, float *rate, float *step) {
    *rate = sizes.largest_rate * first_of(sigmoid(splat(*rate)));
    float moved = first_of(softplus(splat(*step + weights.step_bias[head])));
    *step = first_of(exp(splat(weights.decay[head] * moved)));
}

// to = rms_norm(out) * silu(gate)
template <class Value>
void gate_outputs(const DeltaSizes &sizes, const DeltaWeights &weights, float *out, const float *gate, Value *to) {
    rms_norm(out, weights.norm, sizes.value_dim, sizes.epsilon, out);
    by_lanes(
        sizes.value_dim, [&](int i) { store(to + i, mul(load(out + i), silu(load(gate + i)))); },
        [&](int i, int rest) {
            store_part(to + i, mul(load_part(out + i, rest), silu(load_part(gate + i, rest))), rest);
        });
}

// Advances the matrices of all heads of values that one head of keys serves. `from` and `to`: [value_heads, key_dim,
// value_dim] of the sequence before and behind these rows; they may be one. `out` [rows, out_stride] gets the outputs of
// these heads. What the rows have of them is used up.
template <class Value>
void advance_delta(const DeltaSizes &sizes, const DeltaWeights &weights, const DeltaRows &rows, int32_t key_head,
                   const float *from, float *to, Value *out, int64_t out_stride) {
    int64_t query = int64_t{key_head} * sizes.key_dim, key = sizes.keys() + query;
    int64_t matrix = int64_t{sizes.key_dim} * sizes.value_dim;
    for (int i = 0; i < rows.count; i++) {
        scale_to_length(rows.row(i) + query, sizes.key_dim, 1.0f / std::sqrt(static_cast<float>(sizes.key_dim)));
        scale_to_length(rows.row(i) + key, sizes.key_dim, 1.0f);
    }
    for (int32_t own = 0; own < sizes.share(); own++) {
        int32_t number = key_head * sizes.share() + own;
        int64_t begin = int64_t{number} * sizes.value_dim, place = number * matrix;
        DeltaHead head{query, key, 2 * sizes.keys() + begin, rows.rate + number, rows.step + number};
        for (int i = 0; i < rows.count; i++) {
            ready_rates(sizes, weights, number, rows.row(i) + head.rate, rows.row(i) + head.step);
        }
        advance_matrix(sizes, rows, head, from + place, to + place);
        for (int i = 0; i < rows.count; i++) {
            float *row = rows.row(i);
            gate_outputs(sizes, weights, row + head.value, row + rows.gate + begin, out + i * out_stride + begin);
        }
    }
}

}  // namespace
}  // namespace diptych
