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
inline void load_two(const float *p, Lanes &a, Lanes &b) { a = load(p), b = load(p + kLanes); }
inline void load_two(const bf16 *p, Lanes &a, Lanes &b) { a = load_even(p), b = load_odd(p); }
template <class Stored>
inline void in_order(Lanes &a, Lanes &b) {
    if constexpr (std::is_same<Stored, bf16>::value) interleave(a, b);
}

// The scores of `Registers` of tokens: sums over the head, first to last.
template <int Pairs, int Registers, class Stored, class Load>
inline void dot(const float *queries, const Stored *keys, const HeadBlocks<Stored> &blocks, Load load_keys,
                Lanes (&sum)[Registers][Pairs]) {
#pragma GCC unroll 2
    for (int r = 0; r < Registers; r++) {
#pragma GCC unroll 16
        for (int p = 0; p < Pairs; p++) sum[r][p] = splat(0.0f);
    }
    const float *end = queries + blocks.head_dim * Pairs;
    for (; queries != end; queries += Pairs, keys += blocks.block_size) {
        Lanes k[Registers];
        load_keys(keys, k);
#pragma GCC unroll 16
        for (int p = 0; p < Pairs; p++) {
            Lanes query = splat(queries[p]);
#pragma GCC unroll 2
            for (int r = 0; r < Registers; r++) sum[r][p] = fma(query, k[r], sum[r][p]);
        }
    }
}

// Hides what pairs may not see of the `count` tokens from `token` on, keeps the scores and raises `top`.
template <int Pairs>
inline void keep_scores(const Sight<Pairs> &sight, int token, int count, Lanes (&sum)[Pairs], float *scores,
                        Lanes (&top)[Pairs]) {
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

// scores[chunk][pair][lane] of one block.
template <int Pairs, class Stored>
inline void score_block(const HeadBlocks<Stored> &blocks, const Sight<Pairs> &sight, int block, const float *queries,
                        float *scores, Lanes (&top)[Pairs]) {
    const Stored *keys = blocks.keys(block);
    int c = 0, token = block * blocks.block_size, rest = blocks.block_size;
    if constexpr (2 * Pairs <= kSums) {
        for (; rest >= 2 * kLanes; c += 2, token += 2 * kLanes, rest -= 2 * kLanes) {
            Lanes sum[2][Pairs];
            dot<Pairs, 2>(queries, keys + c * kLanes, blocks, [](auto *k, auto &to) { load_two(k, to[0], to[1]); }, sum);
#pragma GCC unroll 16
            for (int p = 0; p < Pairs; p++) in_order<Stored>(sum[0][p], sum[1][p]);
            keep_scores(sight, token, kLanes, sum[0], scores + c * Pairs * kLanes, top);
            keep_scores(sight, token + kLanes, kLanes, sum[1], scores + (c + 1) * Pairs * kLanes, top);
        }
    }
    for (; rest > 0; c++, token += kLanes, rest -= kLanes) {
        Lanes sum[1][Pairs];
        if (rest >= kLanes) {
            dot<Pairs, 1>(queries, keys + c * kLanes, blocks, [](auto *k, auto &to) { to[0] = load(k); }, sum);
        } else {
            auto load_rest = [rest](auto *k, auto &to) { to[0] = load_part(k, rest); };
            dot<Pairs, 1>(queries, keys + c * kLanes, blocks, load_rest, sum);
        }
        keep_scores(sight, token, rest < kLanes ? rest : kLanes, sum[0], scores + c * Pairs * kLanes, top);
    }
}

// scores[chunk][pair][lane] and the greatest of each pair; -inf where a pair may not see.
template <int Pairs, class Stored>
void score(const HeadBlocks<Stored> &blocks, const Sight<Pairs> &sight, const float *queries, float *scores,
           float *greatest) {
    Lanes top[Pairs];
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) top[p] = splat(kHidden);
    for (int block = sight.first / blocks.block_size; block * blocks.block_size < sight.last; block++) {
        if (blocks.cold) {
            if ((block + 1) * blocks.block_size < sight.last) blocks.fetch(blocks.keys(block + 1));
            blocks.fetch(blocks.value(block, 0));
        }
        score_block<Pairs>(blocks, sight, block, queries, scores, top);
        scores += blocks.chunks() * Pairs * kLanes;
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

// `Wide` registers of one token's values, as `load_two` gives them, or `rest` lanes.
template <int Wide, class Stored>
inline void load_values(const Stored *value, int rest, Lanes (&v)[Wide]) {
    if constexpr (Wide == 1) {
        v[0] = rest < kLanes ? load_part(value, rest) : load(value);
    } else {
#pragma GCC unroll 2
        for (int j = 0; j < Wide; j += 2) load_two(value + j * kLanes, v[j], v[j + 1]);
    }
}

// Adds `count` tokens of a block that all pairs see, from `lane` of a register of scores on; `weight` is that of lane 0
// and pair 0. The sums are taken out of memory: in an array that is someone else's the compiler keeps them there.
template <int Pairs, int Wide, class Stored>
[[gnu::noinline]] void mix_seen(const Stored *value, int64_t width, const float *weight, int lane, int count, int rest,
                                Lanes (&mixed)[Pairs][Wide]) {
    Lanes sum[Pairs][Wide];
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) {
#pragma GCC unroll 4
        for (int j = 0; j < Wide; j++) sum[p][j] = mixed[p][j];
    }
    for (int end = lane + count; lane < end; lane = 0, end -= kLanes, weight += Pairs * kLanes) {
        for (int stop = end < kLanes ? end : kLanes; lane < stop; lane++, value += width) {
            Lanes v[Wide];
            load_values<Wide>(value, rest, v);
#pragma GCC unroll 16
            for (int p = 0; p < Pairs; p++) {
                Lanes w = splat(weight[p * kLanes + lane]);
#pragma GCC unroll 4
                for (int j = 0; j < Wide; j++) sum[p][j] = fma(w, v[j], sum[p][j]);
            }
        }
    }
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) {
#pragma GCC unroll 4
        for (int j = 0; j < Wide; j++) mixed[p][j] = sum[p][j];
    }
}

// The same for one token that some pairs may not see. Not adding is not the same as adding 0 x value: the value may be
// infinite.
template <int Pairs, int Wide, class Stored>
void mix_where_seen(const Sight<Pairs> &sight, int token, const Stored *value, const float *weight, int rest,
                    Lanes (&mixed)[Pairs][Wide]) {
    Lanes v[Wide];
    load_values<Wide>(value, rest, v);
    for (int p = 0; p < Pairs; p++) {
        if (token < sight.begin[p] || token >= sight.end[p]) continue;
        for (int j = 0; j < Wide; j++) mixed[p][j] = fma(splat(weight[p * kLanes]), v[j], mixed[p][j]);
    }
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
    int first_block = sight.first / blocks.block_size, registers = blocks.chunks();
    for (int token = sight.first, stop; token < sight.last; token = stop) {
        int block = token / blocks.block_size, within = token % blocks.block_size, lane = within % kLanes;
        stop = token - within + blocks.block_size;
        for (int border : {sight.last, sight.common_begin, sight.common_end}) {
            if (token < border && border < stop) stop = border;
        }
        const Stored *value = blocks.value(block, within) + d;
        const float *weight =
            weights + static_cast<int64_t>((block - first_block) * registers + within / kLanes) * Pairs * kLanes;
        if (token >= sight.common_begin && stop <= sight.common_end) {
            mix_seen<Pairs, Wide>(value, blocks.head_dim, weight, lane, stop - token, rest, mixed);
            continue;
        }
        for (; token < stop; token++, value += blocks.head_dim) {
            mix_where_seen(sight, token, value, weight + lane, rest, mixed);
            if (++lane == kLanes) lane = 0, weight += Pairs * kLanes;
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
        if constexpr (Wide > 1) {
#pragma GCC unroll 2
            for (int j = 0; j < Wide; j += 2) in_order<Stored>(mixed[p][j], mixed[p][j + 1]);
        }
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
    constexpr int kWide = 4 * Pairs <= kSums ? 4 : 2 * Pairs <= kSums ? 2 : 1;
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
