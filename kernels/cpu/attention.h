// Attention over paged blocks, in place: keys [head_dim, block_size] (lanes are tokens), values
// [block_size, head_dim].
//
// One task serves the queries of a few neighbouring rows that share a KV head ("pairs" of row and query head).
// For each pair, scores, their sum and the mixed values are taken token by token in an order that depends on
// absolute positions alone, and a token that the pair may not see is never touched for it: its bits are those
// of a task of its own.
#pragma once

#include <limits>

#include "gemm.h"
#include "vector_math.h"

namespace diptych {
namespace {

template <class Stored>
struct HeadBlocks {
    const int32_t *table;
    const Stored *memory;    // this layer's keys of this head in block 0
    int64_t block_stride;    // elements from one block to the next
    int64_t values;          // from keys to the values of the same head
    int block_size, head_dim;
    bool cold;               // read once in this phase, so from memory: worth fetching ahead

    const Stored *keys(int block) const { return memory + table[block] * block_stride; }
    const Stored *value(int block, int lane) const {
        return keys(block) + values + static_cast<int64_t>(lane) * head_dim;
    }
    // Keys and values of a head lie scattered in pieces of some 2 KiB, too short for the hardware to see coming.
    void fetch(const Stored *piece) const {
        auto *bytes = reinterpret_cast<const char *>(piece);
        int64_t size = static_cast<int64_t>(head_dim) * block_size * static_cast<int64_t>(sizeof(Stored));
        for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(bytes + line, 0, 2);
    }
    int chunks() const { return (block_size + kLanes - 1) / kLanes; }  // registers of tokens in a block
};

template <class Stored>
HeadBlocks<Stored> head_blocks(const StepState &step, int sequence, int layer, int kv_head, bool cold) {
    const DiptychModel &model = *step.model;
    int64_t half = step.block_elements(), head = static_cast<int64_t>(model.shape.head_dim) * step.batch.block_size;
    auto *memory = reinterpret_cast<const Stored *>(step.batch.memories[sequence]);
    return {step.tables[sequence], memory + 2 * half * layer + head * kv_head, 2 * half * model.shape.layers,
            half, step.batch.block_size, model.shape.head_dim, cold};
}

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

// The scores of one register of tokens: sums over the head, first to last.
template <int Pairs, class Stored, class Load>
inline void dot(const float *queries, const Stored *keys, const HeadBlocks<Stored> &blocks, Load load_keys,
                Lanes (&sum)[Pairs]) {
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) sum[p] = splat(0.0f);
    const float *end = queries + blocks.head_dim * Pairs;
    for (; queries != end; queries += Pairs, keys += blocks.block_size) {
        Lanes k = load_keys(keys);
#pragma GCC unroll 16
        for (int p = 0; p < Pairs; p++) sum[p] = fma(splat(queries[p]), k, sum[p]);
    }
}

// scores[chunk][pair][lane] and the greatest of each pair; -inf where a pair may not see.
template <int Pairs, class Stored>
void score(const HeadBlocks<Stored> &blocks, const Sight<Pairs> &sight, const float *queries, float *scores,
           float *greatest) {
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    Lanes top[Pairs];
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) top[p] = splat(kHidden);
    for (int block = sight.first / blocks.block_size; block * blocks.block_size < sight.last; block++) {
        if (blocks.cold) {
            if ((block + 1) * blocks.block_size < sight.last) blocks.fetch(blocks.keys(block + 1));
            blocks.fetch(blocks.value(block, 0));
        }
        for (int c = 0; c < blocks.chunks(); c++, scores += Pairs * kLanes) {
            const Stored *keys = blocks.keys(block) + c * kLanes;
            int token = block * blocks.block_size + c * kLanes;
            int count = blocks.block_size - c * kLanes < kLanes ? blocks.block_size - c * kLanes : kLanes;
            Lanes sum[Pairs];
            if (count == kLanes) {
                dot<Pairs>(queries, keys, blocks, [](const Stored *k) { return load(k); }, sum);
            } else {
                dot<Pairs>(queries, keys, blocks, [count](const Stored *k) { return load_part(k, count); }, sum);
            }
            bool open = count == kLanes && token >= sight.common_begin && token + kLanes <= sight.common_end;
#pragma GCC unroll 16
            for (int p = 0; p < Pairs; p++) {
                if (!open) {
                    int low = sight.begin[p] - token, high = sight.end[p] - token;
                    low = low < 0 ? 0 : low < kLanes ? low : kLanes;
                    high = high < 0 ? 0 : high < count ? high : count;
                    sum[p] = keep_range(sum[p], low, high, kHidden);
                }
                top[p] = max(top[p], sum[p]);
                store(scores + p * kLanes, sum[p]);
            }
        }
    }
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) greatest[p] = max_of(top[p]);
}

// Turns scores into e^(score - greatest) and gives one over their sum.
template <int Pairs>
void weigh(float *scores, int64_t chunks, const float *greatest, float *scale) {
    Lanes sum[Pairs];
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) sum[p] = splat(0.0f);
    for (int64_t c = 0; c < chunks; c++) {
#pragma GCC unroll 16
        for (int p = 0; p < Pairs; p++, scores += kLanes) {
            Lanes weight = exp(sub(load(scores), splat(greatest[p])));
            sum[p] = add(sum[p], weight);
            store(scores, weight);
        }
    }
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) scale[p] = 1.0f / sum_of(sum[p]);
}

// Mixes `Wide` registers of the values, lanes d .. of the head.
template <int Pairs, int Wide, class Stored>
void mix(const HeadBlocks<Stored> &blocks, const Sight<Pairs> &sight, const float *weights, int d, int rest,
         Lanes (&mixed)[Pairs][Wide]) {
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) {
#pragma GCC unroll 4
        for (int j = 0; j < Wide; j++) mixed[p][j] = splat(0.0f);
    }
    int first_block = sight.first / blocks.block_size, padded = blocks.chunks() * kLanes;
    for (int block = first_block; block * blocks.block_size < sight.last; block++) {
        int base = block * blocks.block_size;
        int begin = sight.first > base ? sight.first - base : 0;
        int end = sight.last - base < blocks.block_size ? sight.last - base : blocks.block_size;
        const float *row = weights + static_cast<int64_t>(block - first_block) * padded * Pairs;
        const Stored *value = blocks.value(block, begin) + d;
        for (int t = begin; t < end; t++, value += blocks.head_dim) {
            const float *weight = row + (t / kLanes) * Pairs * kLanes + t % kLanes;
            Lanes v[Wide];
#pragma GCC unroll 4
            for (int j = 0; j < Wide; j++) {
                v[j] = rest < kLanes ? load_part(value, rest) : load(value + j * kLanes);
            }
            if (base + t >= sight.common_begin && base + t < sight.common_end) {
#pragma GCC unroll 16
                for (int p = 0; p < Pairs; p++) {
#pragma GCC unroll 4
                    for (int j = 0; j < Wide; j++) mixed[p][j] = fma(splat(weight[p * kLanes]), v[j], mixed[p][j]);
                }
                continue;
            }
#pragma GCC unroll 16
            for (int p = 0; p < Pairs; p++) {
                // Not adding is not the same as adding 0 x value: the value may be infinite.
                if (base + t < sight.begin[p] || base + t >= sight.end[p]) continue;
#pragma GCC unroll 4
                for (int j = 0; j < Wide; j++) mixed[p][j] = fma(splat(weight[p * kLanes]), v[j], mixed[p][j]);
            }
        }
    }
}

template <int Pairs, int Wide, class Stored, class Out>
void mix_lanes(const HeadBlocks<Stored> &blocks, const Sight<Pairs> &sight, const float *weights,
               const float *scale, int d, int rest, Out *const *out) {
    Lanes mixed[Pairs][Wide];
    mix<Pairs, Wide>(blocks, sight, weights, d, rest, mixed);
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) {
#pragma GCC unroll 4
        for (int j = 0; j < Wide; j++) {
            Lanes v = mul(mixed[p][j], splat(scale[p]));
            if (rest < kLanes) {
                store_part(out[p] + d, v, rest);
            } else {
                store(out[p] + d + j * kLanes, v);
            }
        }
    }
}

// query[p] is the query of pair p, out[p] receives its head_dim mixed values. In `scratch` queries [head_dim][Pairs]
// and after them the scores.
template <int Pairs, class Stored, class Out>
void attend(const HeadBlocks<Stored> &blocks, const Sight<Pairs> &sight, const float *const *query, float *scratch,
            Out *const *out) {
    constexpr int kWide = Pairs <= 3 ? 4 : Pairs <= 6 ? 2 : 1;  // sums that fit beside each other
    float *scores = scratch + blocks.head_dim * Pairs;
    for (int p = 0; p < Pairs; p++) {
        for (int d = 0; d < blocks.head_dim; d++) scratch[d * Pairs + p] = query[p][d];
    }
    float greatest[Pairs], scale[Pairs];
    score<Pairs>(blocks, sight, scratch, scores, greatest);
    int64_t covered = (sight.last + blocks.block_size - 1) / blocks.block_size - sight.first / blocks.block_size;
    weigh<Pairs>(scores, covered * blocks.chunks(), greatest, scale);
    int d = 0, width = blocks.head_dim;
    for (; d + kWide * kLanes <= width; d += kWide * kLanes) {
        mix_lanes<Pairs, kWide>(blocks, sight, scores, scale, d, kLanes, out);
    }
    for (; d + kLanes <= width; d += kLanes) mix_lanes<Pairs, 1>(blocks, sight, scores, scale, d, kLanes, out);
    if (d < width) mix_lanes<Pairs, 1>(blocks, sight, scores, scale, d, width - d, out);
}

}  // namespace
}  // namespace diptych
