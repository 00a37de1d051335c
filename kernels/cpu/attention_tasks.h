// The tasks of attention: each serves the queries of a few neighbouring rows that share a KV head.
#pragma once

#include "attention.h"
#include "tree_attention.h"
#if defined(__AVX512BF16__)
#include "attention_pairs.h"
#endif

namespace diptych {
namespace {

struct AttentionTask {
    const Layer *layer;
    int layer_index, kv_head;
    const RowSet *set;
    RowTile tile;  // of it

    int row(int place) const { return set->row(tile.first + place); }

    // The first token that a row may see.
    int begin(const StepState &step, int row) const {
        int position = step.rows[row].position, window = layer->own.window;
        return window > 0 && position >= window ? position + 1 - window : 0;
    }
    // Whether it is the only one to read its keys and values. They come from memory then.
    bool reads_alone() const { return tile.rows == 1; }

    template <class Stored>
    HeadBlocks<Stored> blocks(const StepState &step) const {
        return head_blocks<Stored>(step, step.rows[row(0)].sequence, layer_index, kv_head);
    }
    // The blocks that its first row sees.
    template <class Stored>
    BlockRange<Stored> range(const StepState &step) const {
        int size = step.batch.block_size;
        return {blocks<Stored>(step), begin(step, row(0)) / size, step.rows[row(0)].position / size + 1};
    }
};

// Attention of `Pairs` (row, head) pairs of a task, from the `first` on, over its `blocks`.
template <class Kind, int Pairs, class Stored>
void attend_pairs(StepState &step, const AttentionTask &task, int first, const HeadBlocks<Stored> &blocks,
                  const BlockRange<Stored> &next, float *scratch) {
    const DiptychModel &model = *step.model;
    int width = model.shape.head_dim, size = step.batch.block_size;
    int group = model.group(task.kv_head), first_head = model.first_head(task.kv_head);
    Sight<Pairs> sight;
    ScoreRules rules;
    rules.cap = model.shape.score_cap;
    rules.sinks = !task.layer->sinks.empty();
    const float *query[Pairs];
    typename Kind::Value *out[Pairs];
    for (int p = 0; p < Pairs; p++) {
        int place = (first + p) / group, row = task.row(place), head = first_head + (first + p) % group;
        sight.begin[p] = task.begin(step, row);
        sight.end[p] = step.rows[row].end;
        rules.sink[p] = rules.sinks ? task.layer->sinks[static_cast<size_t>(head)] : 0.0f;
        query[p] = step.qkv_row(row) + head * width;
        out[p] = static_cast<typename Kind::Value *>(step.mixed.get()) +
                 (task.tile.first + place) * step.mixed_stride + model.mixed_places[static_cast<size_t>(head)];
    }
    sight.close();
    Pieces<Stored> pieces = {{blocks, sight.first / size, (sight.last - 1) / size + 1},
                             next, task.reads_alone() && first == 0};
#if defined(__AVX512BF16__)
    if constexpr (std::is_same<typename Kind::Stored, bf16>::value) {
        if (size % kLanes == 0) return attend_in_pairs<Pairs>(pieces, sight, rules, query, scratch, out);
    }
#endif
    attend<Pairs>(pieces, sight, rules, query, scratch, out);
}

// `next`: what the task after this one reads first, where that is known.
template <class Kind, class Stored>
void attend_task(StepState &step, const AttentionTask &task, const BlockRange<Stored> &next, float *scratch) {
    int pairs = task.tile.rows * step.model->group(task.kv_head);
    HeadBlocks<Stored> blocks = task.blocks<Stored>(step);
    const Row &row = step.rows[static_cast<size_t>(task.row(0))];
    if (row.path >= 0) {  // its tile is this row alone
        float *behind = scratch + step.score_floats - step.tree_floats;
        blocks = along_path(step, blocks, row, reinterpret_cast<Stored *>(behind));
    }
    for (int first = 0; first < pairs; first += kPairs) {
        int count = pairs - first < kPairs ? pairs - first : kPairs;
        with_count<kPairs>(count, [&](auto n) { attend_pairs<Kind, n()>(step, task, first, blocks, next, scratch); });
    }
}

}  // namespace
}  // namespace diptych
