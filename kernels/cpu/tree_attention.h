// Attention of rows in trees of tokens (token_tree.h).
//
// A row lies in the lane of its place in the step, and sees its ancestors as if they lay in the lanes of their
// positions: attention reads them from a copy of the last blocks in which they do (`along_path`). So whatever depends
// on the lane of a token, an order of additions or a pair, is as it is in a chain, and a row has the bits of the chain
// of its ancestors alone.
#pragma once

#include <cstring>

#include "attention_blocks.h"

namespace diptych {

namespace {

// Copies the scales of the token in lane `from` to lane `lane` of the copied block at `to`.
inline void copy_scales(const HeadBlocks<int8_t> &blocks, int from, int8_t *to, int lane) {
    int block = from / blocks.block_size, within = from % blocks.block_size;
    int64_t at = blocks.head - scale_bytes(blocks.block_size) + scale_bytes(lane);
    std::memcpy(to + at, blocks.key_scales(block) + within, sizeof(float));
    std::memcpy(to + blocks.head + at, blocks.value_scales(block) + within, sizeof(float));
}

// Copies the blocks of one head in which a row's ancestors of this step have positions, with these in their lanes, to
// `to`, and returns `blocks` with the copies in place of the blocks.
template <class Stored>
HeadBlocks<Stored> along_path(const StepState &step, HeadBlocks<Stored> blocks, const Row &row, Stored *to) {
    int start = step.batch.starts[row.sequence], size = blocks.block_size, width = blocks.head_dim;
    const int32_t *path = &step.paths[static_cast<size_t>(row.path)];
    int64_t half = blocks.head, numbers = static_cast<int64_t>(width) * size;
    HeadBlocks<Stored> view = blocks;
    view.own_from = start / size;
    view.own = to;
    for (int block = start / size; block <= row.position / size; block++, to += 2 * half) {
        std::memcpy(to, blocks.keys(block), static_cast<size_t>(half) * sizeof(Stored));
        std::memcpy(to + half, blocks.value(block, 0), static_cast<size_t>(half) * sizeof(Stored));
        for (int lane = 0; lane < size; lane++) {
            int position = block * size + lane;
            if (position < start || position > row.position) continue;
            int from = path[position - start];
            if (from == position) continue;
            const Stored *keys = blocks.keys(from / size) + from % size;
            for (int64_t d = 0; d < numbers; d += size) to[d + lane] = keys[d];
            std::memcpy(to + half + static_cast<int64_t>(lane) * width, blocks.value(from / size, from % size),
                        static_cast<size_t>(width) * sizeof(Stored));
            if constexpr (kHasScales<Stored>) copy_scales(blocks, from, to, lane);
        }
    }
    return view;
}

}  // namespace
}  // namespace diptych
