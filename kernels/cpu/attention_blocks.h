// Where attention finds keys and values, and what of them a query may see.
#pragma once

#include <limits>

#include "gemm.h"
#include "vector_math.h"

namespace diptych {
namespace {

// A register of neighbouring tokens of one block, or fewer where the block ends. None: count is 0.
template <class Stored>
struct Tokens {
    int block, first, count;
    const Stored *keys;  // of the first lane of the head
};

template <class Stored>
struct HeadBlocks {
    const int32_t *table;
    const Stored *memory;    // this layer's keys of this head in block 0
    int64_t block_stride;    // elements from one block to the next
    int64_t values;          // from keys to the values of the same head
    int64_t head;            // elements of its keys, or values, in a block
    int block_size, head_dim;
    int own_from = std::numeric_limits<int>::max();  // blocks from here on are copies (tree_attention.h): keys, then values
    const Stored *own = nullptr;

    const Stored *keys(int block) const {
        return block < own_from ? memory + table[block] * block_stride : copy(block);
    }
    const Stored *value(int block, int lane) const {
        int64_t at = static_cast<int64_t>(lane) * head_dim;
        return block < own_from ? keys(block) + values + at : copy(block) + head + at;
    }
    const Stored *copy(int block) const { return own + 2 * head * (block - own_from); }
    // Scales of a block's tokens, where numbers have them.
    const float *key_scales(int block) const { return behind(keys(block)); }
    const float *value_scales(int block) const { return behind(value(block, 0)); }
    const float *behind(const Stored *numbers) const {
        return reinterpret_cast<const float *>(numbers + head - scale_bytes(block_size));
    }
    int chunks() const { return (block_size + kLanes - 1) / kLanes; }  // registers of tokens in a block

    // The first register of a block, and the one after another.
    Tokens<Stored> of_block(int block) const {
        return {block, block * block_size, block_size < kLanes ? block_size : kLanes, keys(block)};
    }
    Tokens<Stored> after(Tokens<Stored> now, int last_block) const {
        int first = now.first + now.count, rest = (now.block + 1) * block_size - first;
        if (rest == 0 && now.block == last_block) return {now.block, first, 0, nullptr};
        if (rest == 0) return of_block(now.block + 1);
        return {now.block, first, rest < kLanes ? rest : kLanes, now.keys + now.count};
    }
};

template <class Stored>
HeadBlocks<Stored> head_blocks(const StepState &step, int sequence, int layer, int kv_head) {
    const DiptychModel &model = *step.model;
    int64_t half = step.block_elements(), head = step.head_elements();
    auto *memory = reinterpret_cast<const Stored *>(step.batch.memories[sequence]);
    return {step.table(layer, sequence), memory + step.layer_elements(layer) + head * kv_head, step.block_stride(),
            half, head, step.batch.block_size, model.shape.head_dim};
}

// Blocks first .. end - 1 of one head.
template <class Stored>
struct BlockRange {
    HeadBlocks<Stored> blocks{};
    int first = 0, end = 0;
};

// A piece is what one head has in one block, its keys or its values: some 2 KiB, scattered, too short for the hardware
// to see coming. While a task computes on one piece it asks for the one so many later, which keeps memory busy. Steps
// of 16 rows took 5% longer with two on a Zen 5, 1% longer with eight.
constexpr int kPiecesAhead = 4;

// The order in which a task reads its pieces: keys, values, and then the keys of the next task, where that is known.
template <class Stored>
struct Pieces {
    BlockRange<Stored> own, next;
    bool cold = false;  // read once in this phase, so from memory: worth fetching ahead

    // The piece to fetch beside this block's keys, or values; null where there is none.
    const Stored *after_keys(int block) const { return at(block - own.first + kPiecesAhead); }
    const Stored *after_values(int block) const { return at(own.end - own.first + block - own.first + kPiecesAhead); }

  private:
    const Stored *at(int i) const {
        int count = own.end - own.first;
        if (!cold) return nullptr;
        if (i < count) return own.blocks.keys(own.first + i);
        if (i < 2 * count) return own.blocks.value(own.first + i - count, 0);
        int block = next.first + i - 2 * count;
        return block < next.end ? next.blocks.keys(block) : nullptr;
    }
};

template <class Stored>
inline void fetch_lines(const Stored *from, int count) {
    constexpr int kLine = 64 / static_cast<int>(sizeof(Stored));
    for (int i = 0; i < count; i += kLine) __builtin_prefetch(from + i, 0, 2);
}

// Asks for the scales of a block's values, which are read after all scores, and for those behind the keys at `ahead`.
inline void fetch_scales(const HeadBlocks<int8_t> &blocks, int block, const int8_t *ahead) {
    fetch_lines(blocks.value_scales(block), blocks.block_size);
    fetch_lines(blocks.behind(ahead), blocks.block_size);
}

constexpr float kHidden = -std::numeric_limits<float>::infinity();  // the score of what a pair may not see

// What the pairs of a task may see: tokens begin[p] .. end[p]-1.
template <int Pairs>
struct Sight {
    int begin[Pairs], end[Pairs];
    int first, last;                  // of any
    int common_begin, common_end;     // of all; empty if they meet nowhere

    void close() {
        first = begin[0], last = end[0], common_begin = begin[0], common_end = end[0];
        for (int p = 1; p < Pairs; p++) {
            first = begin[p] < first ? begin[p] : first;
            last = end[p] > last ? end[p] : last;
            common_begin = begin[p] > common_begin ? begin[p] : common_begin;
            common_end = end[p] < common_end ? end[p] : common_end;
        }
        if (common_end < common_begin) common_end = common_begin;
    }
};

// Two registers of neighbouring numbers. bf16 come as even and odd ones, which is one instruction a register instead
// of two, until `in_order` puts them right.
template <class Stored>
inline void load_two(const Stored *p, Lanes &a, Lanes &b) { a = load(p), b = load(p + kLanes); }
inline void load_two(const bf16 *p, Lanes &a, Lanes &b) { a = load_even(p), b = load_odd(p); }
template <class Stored>
inline void in_order(Lanes &a, Lanes &b) {
    if constexpr (std::is_same<Stored, bf16>::value) interleave(a, b);
}

}  // namespace
}  // namespace diptych
