// Between the QKV product and attention: heads are normed and rotated, keys and values written to their blocks.
#pragma once

#include "int8_cache.h"
#include "model_share.h"
#include "step_state.h"
#include "vector_math.h"

namespace diptych {
namespace {

// The factor of a query at `position`.
inline float query_growth(const DiptychShape &shape, int32_t position) {
    if (shape.growth_length == 0) return 1.0f;
    return 1.0f + shape.growth * std::log(1.0f + static_cast<float>(position / shape.growth_length));
}

inline void scale_head(float *head, int width, float scale) {
    Lanes s = splat(scale);
    by_lanes(
        width, [&](int i) { store(head + i, mul(load(head + i), s)); },
        [&](int i, int rest) { store_part(head + i, mul(load_part(head + i, rest), s), rest); });
}

// What a layer does with the heads of one row before attention.
struct HeadRules {
    const DiptychShape &shape;
    const float *cosines = nullptr, *sines = nullptr;  // of the row's position; null: heads are not rotated
    float query_scale;

    HeadRules(const StepState &step, const Layer &layer, int64_t row)
        : shape(step.model->shape) {
        int32_t position = step.rows[static_cast<size_t>(row)].position;
        query_scale = shape.query_scale * query_growth(shape, position);
        if (layer.own.rotation < 0) return;
        const DiptychRotation &table = step.model->rotations[static_cast<size_t>(layer.own.rotation)];
        int64_t turn = static_cast<int64_t>(step.rows[static_cast<size_t>(row)].turn) * (shape.head_dim / 2);
        cosines = table.cosines + turn;
        sines = table.sines + turn;
    }

    // `norm`: of a head, or null.
    void apply(float *head, const float *norm, float scale) const {
        int width = shape.head_dim;
        bool normed = norm != nullptr, last = shape.norm_after_rotation != 0;
        if (normed && !last) rms_norm(head, norm, width, shape.rms_epsilon, head);
        float now = normed && last ? 1.0f : scale;
        if (cosines != nullptr) {
            rotate(head, cosines, sines, width, now);
        } else if (now != 1.0f) {
            scale_head(head, width, now);
        }
        if (!normed || !last) return;
        rms_norm(head, norm, width, shape.rms_epsilon, head);
        if (scale != 1.0f) scale_head(head, width, scale);
    }

    // Heads beside each other. A norm over all their lanes comes first.
    void apply_to(float *heads, int count, const std::vector<float> &norm, float scale) const {
        bool together = static_cast<int>(norm.size()) > shape.head_dim;
        if (together) rms_norm(heads, norm.data(), count * shape.head_dim, shape.rms_epsilon, heads);
        const float *of_head = norm.empty() || together ? nullptr : norm.data();
        for (int h = 0; h < count; h++) apply(heads + h * shape.head_dim, of_head, scale);
    }
};

// Norms and rotates the heads of one row; its keys come after its queries, and its values after these.
inline void norm_and_rotate_heads(const StepState &step, const Layer &layer, int64_t row) {
    const DiptychModel &model = *step.model;
    HeadRules rules(step, layer, row);
    float *queries = step.qkv_row(row);
    static const std::vector<float> done;  // of a share, whose norm over all heads is behind it (width_norms.h)
    bool normed = model.share && model.share->query_lanes > 0;
    rules.apply_to(queries, model.shape.heads, normed ? done : layer.query_norm, rules.query_scale);
    rules.apply_to(queries + model.query_width(), model.shape.kv_heads, normed ? done : layer.key_norm, 1.0f);
}

// Writes the key of one token into its lane of a block: `key` [head_dim] float32.
template <class Stored>
void write_key(const float *key, int width, Stored *to, int block_size) {
    Stored part[kLanes];
    auto spread = [&](int i, int count) {
        for (int j = 0; j < count; j++) to[static_cast<int64_t>(i + j) * block_size] = part[j];
    };
    by_lanes(
        width,
        [&](int i) {
            store(part, load(key + i));
            spread(i, kLanes);
        },
        [&](int i, int rest) {
            store_part(part, load_part(key + i, rest), rest);
            spread(i, rest);
        });
}

// Writes the value of one token: `value` [head_dim] float32.
template <class Stored>
void write_value(const float *value, int width, Stored *to) {
    by_lanes(
        width, [&](int i) { store(to + i, load(value + i)); },
        [&](int i, int rest) { store_part(to + i, load_part(value + i, rest), rest); });
}

// Norms and rotates the heads of some neighbouring tokens of one block, and writes their keys and values there.
// Together: keys of neighbours share cache lines, which would go to and fro between the cores.
template <class Stored>
void write_kv_rows(StepState &step, const Layer &layer, int layer_index, RowTile tile) {
    const DiptychModel &model = *step.model;
    const Row &first = step.rows[tile.first];
    int width = model.shape.head_dim, block_size = step.batch.block_size, lane = first.lane % block_size;
    for (int r = 0; r < tile.rows; r++) norm_and_rotate_heads(step, layer, tile.first + r);
    int64_t half = step.block_elements();
    int64_t block = step.table(layer_index, first.sequence)[first.lane / block_size];
    auto *keys = reinterpret_cast<Stored *>(step.batch.memories[first.sequence]) +
                 step.block_stride() * block + step.layer_elements(layer_index);
    int64_t head = step.head_elements();
    for (int h = 0; h < model.shape.kv_heads; h++, keys += head) {
        for (int r = 0; r < tile.rows; r++) {
            float *key = step.qkv_row(tile.first + r) + model.query_width() + static_cast<int64_t>(h) * width;
            float *value = key + model.kv_width();
            Stored *values = keys + half;
            if constexpr (kHasScales<Stored>) {
                store_scale(keys, head, block_size, lane + r, round_head(key, width));
                store_scale(values, head, block_size, lane + r, round_head(value, width));
            }
            write_key(key, width, keys + lane + r, block_size);
            write_value(value, width, values + static_cast<int64_t>(lane + r) * width);
        }
    }
}

}  // namespace
}  // namespace diptych
