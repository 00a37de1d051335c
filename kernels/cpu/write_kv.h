// Between the QKV product and attention: heads are normed and rotated, keys and values written to their blocks.
#pragma once

#include "step_state.h"
#include "vector_math.h"

namespace diptych {
namespace {

// Norms and rotates the heads of one row; its keys come after its queries, and its values after these.
inline void norm_and_rotate_heads(const StepState &step, const Layer &layer, int64_t row) {
    const DiptychModel &model = *step.model;
    const DiptychShape &shape = model.shape;
    int width = shape.head_dim;
    int64_t turn = static_cast<int64_t>(step.rows[row].position) * (width / 2);
    float *head = step.qkv_row(row);
    for (int h = 0; h < shape.heads + shape.kv_heads; h++, head += width) {
        bool is_query = h < shape.heads;
        const std::vector<float> &norm = is_query ? layer.query_norm : layer.key_norm;
        if (!norm.empty()) rms_norm(head, norm.data(), width, shape.rms_epsilon, head);
        rotate(head, model.cosines + turn, model.sines + turn, width, is_query ? shape.query_scale : 1.0f);
    }
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

// Norms and rotates the heads of some neighbouring tokens of one block, and writes their keys and values there.
// Together: keys of neighbours share cache lines, which would go to and fro between the cores.
template <class Kind>
void write_kv_rows(StepState &step, const Layer &layer, int layer_index, RowTile tile) {
    using Stored = typename Kind::Stored;
    const DiptychModel &model = *step.model;
    const Row &first = step.rows[tile.first];
    int width = model.shape.head_dim, block_size = step.batch.block_size, lane = first.position % block_size;
    for (int r = 0; r < tile.rows; r++) norm_and_rotate_heads(step, layer, tile.first + r);
    int64_t half = step.block_elements();
    int64_t block = step.tables[first.sequence][first.position / block_size];
    auto *keys = reinterpret_cast<Stored *>(step.batch.memories[first.sequence]) +
                 2 * half * (block * model.shape.layers + layer_index);
    const float *head = step.qkv_row(tile.first) + model.query_width();
    for (int h = 0; h < model.shape.kv_heads; h++, head += width, keys += static_cast<int64_t>(width) * block_size) {
        for (int r = 0; r < tile.rows; r++) {
            const float *key = head + r * step.qkv_stride, *value = key + model.kv_width();
            write_key(key, width, keys + lane + r, block_size);
            Stored *values = keys + half + static_cast<int64_t>(lane + r) * width;
            by_lanes(
                width, [&](int i) { store(values + i, load(value + i)); },
                [&](int i, int rest) { store_part(values + i, load_part(value + i, rest), rest); });
        }
    }
}

}  // namespace
}  // namespace diptych
