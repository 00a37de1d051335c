// Norms over all heads of queries, and of keys (OLMo), where each rank of a group has some: the ranks exchange sums of
// squares, those of a part in a place of its own, and add them in the order of the parts.
#pragma once

#include "model_share.h"
#include "row_groups.h"
#include "vector_math.h"

namespace diptych {
namespace {

inline float sum_of_squares(const float *x, int n) {
    Lanes squares = splat(0.0f);
    by_lanes(
        n, [&](int i) { squares = fma(load(x + i), load(x + i), squares); },
        [&](int i, int rest) {
            Lanes v = load_part(x + i, rest);
            squares = fma(v, v, squares);
        });
    return sum_of(squares);
}

inline void scale_by(float *x, float scale, const float *weight, int n) {
    Lanes factor = splat(scale);
    by_lanes(
        n, [&](int i) { store(x + i, mul(mul(load(x + i), factor), load(weight + i))); },
        [&](int i, int rest) {
            store_part(x + i, mul(mul(load_part(x + i, rest), factor), load_part(weight + i, rest)), rest);
        });
}

// Leaves a part's sums of squares of a row: of its queries, and of the keys that it counts.
inline void leave_squares(const StepState &step, int32_t own, int64_t row) {
    const DiptychModel &model = *step.model;
    const ModelShare &share = *model.share;
    auto part = static_cast<size_t>(own);
    int width = model.shape.head_dim, first = own == 0 ? 0 : share.head_ends[part - 1];
    const float *queries = step.qkv_row(row), *keys = queries + model.query_width();
    int32_t begin = share.counted[2 * part], end = share.counted[2 * part + 1];
    float *to = share.exchange.slot(share.part(own), row);
    to[0] = sum_of_squares(queries + first * width, share.query_heads(own) * width);
    to[1] = sum_of_squares(keys + begin * width, (end - begin) * width);
}

// Norms the queries and keys of a row by the squares of all parts.
inline void norm_widths(const StepState &step, const Layer &layer, int64_t row) {
    const DiptychModel &model = *step.model;
    const ModelShare &share = *model.share;
    float query_squares = 0.0f, key_squares = 0.0f, epsilon = model.shape.rms_epsilon;
    for (int32_t part = 0; part < share.parts(); part++) {
        const float *of_part = share.exchange.filled(part, row);
        query_squares += of_part[0];
        key_squares += of_part[1];
    }
    auto scale = [epsilon](float squares, int32_t lanes) {
        return 1.0f / std::sqrt(squares / static_cast<float>(lanes) + epsilon);
    };
    float *queries = step.qkv_row(row);
    scale_by(queries, scale(query_squares, share.query_lanes), layer.query_norm.data(), model.query_width());
    scale_by(queries + model.query_width(), scale(key_squares, share.key_lanes), layer.key_norm.data(), model.kv_width());
}

}  // namespace
}  // namespace diptych
