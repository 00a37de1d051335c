// Attention over paged blocks, in place: keys [head_dim, block_size] (lanes are tokens), values
// [block_size, head_dim].
//
// One task serves the queries of a few neighbouring rows that share a KV head ("pairs" of row and query head).
// For each pair, scores, their sum and the mixed values are taken token by token in an order that depends on
// absolute positions alone, and a token that the pair may not see is never touched for it: its bits are those
// of a task of its own.
#pragma once

#include "attention_blocks.h"
#include "score_rules.h"

namespace diptych {
namespace {

// The scores of `Registers` of tokens: sums over the head, first to last. load_keys(i, to) gives the keys that lie i
// numbers behind those of the first lane.
template <int Pairs, int Registers, class Stored, class Load>
inline void dot(const float *queries, const HeadBlocks<Stored> &blocks, Load load_keys,
                Lanes (&sum)[Registers][Pairs]) {
    int64_t row = blocks.block_size, end = row * blocks.head_dim;
#pragma GCC unroll 2
    for (int r = 0; r < Registers; r++) {
#pragma GCC unroll 16
        for (int p = 0; p < Pairs; p++) sum[r][p] = splat(0.0f);
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < end; i += row, queries += Pairs) {
        Lanes k[Registers];
        load_keys(i, k);
#pragma GCC unroll 16
        for (int p = 0; p < Pairs; p++) {
            Lanes query = splat(queries[p]);
#pragma GCC unroll 2
            for (int r = 0; r < Registers; r++) sum[r][p] = fma(query, k[r], sum[r][p]);
        }
    }
}

// Hides what pairs may not see of a register of tokens, keeps the scores and raises `top`.
template <int Pairs, class Stored>
inline void keep_scores(const Sight<Pairs> &sight, Tokens<Stored> tokens, Lanes (&sum)[Pairs], float *scores,
                        Lanes (&top)[Pairs]) {
    int token = tokens.first, count = tokens.count;
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

// Multiplies a register of scores with the scales of its tokens' keys, where they have some.
template <int Pairs, class Stored>
inline void scale_scores(const HeadBlocks<Stored> &blocks, Tokens<Stored> tokens, Lanes (&sum)[Pairs]) {
    if constexpr (kHasScales<Stored>) {
        const float *scales = blocks.key_scales(tokens.block) + tokens.first - tokens.block * blocks.block_size;
        Lanes scale = tokens.count == kLanes ? load(scales) : load_part(scales, tokens.count);
#pragma GCC unroll 16
        for (int p = 0; p < Pairs; p++) sum[p] = mul(sum[p], scale);
    }
}

// Scores `now` and, if both are full and there is room for so many sums, `next`: what waits for one sum has others to
// do. Returns how many they were.
template <int Pairs, class Stored>
inline int score_some(const HeadBlocks<Stored> &blocks, const Sight<Pairs> &sight, Tokens<Stored> now,
                      Tokens<Stored> next, const float *queries, float *scores, Lanes (&top)[Pairs]) {
    if constexpr (2 * Pairs <= kSums) {
        if (now.count == kLanes && next.count == kLanes) {
            const Stored *keys = now.keys, *more = next.keys;
            Lanes sum[2][Pairs];
            if (more == keys + kLanes) {
                dot(queries, blocks, [=](int64_t i, auto &to) { load_two(keys + i, to[0], to[1]); }, sum);
#pragma GCC unroll 16
                for (int p = 0; p < Pairs; p++) in_order<Stored>(sum[0][p], sum[1][p]);
            } else {
                dot(queries, blocks, [=](int64_t i, auto &to) { to[0] = load(keys + i), to[1] = load(more + i); }, sum);
            }
            scale_scores(blocks, now, sum[0]);
            scale_scores(blocks, next, sum[1]);
            keep_scores(sight, now, sum[0], scores, top);
            keep_scores(sight, next, sum[1], scores + Pairs * kLanes, top);
            return 2;
        }
    }
    const Stored *keys = now.keys;
    Lanes sum[1][Pairs];
    if (now.count == kLanes) {
        dot(queries, blocks, [=](int64_t i, auto &to) { to[0] = load(keys + i); }, sum);
    } else {
        dot(queries, blocks, [=, n = now.count](int64_t i, auto &to) { to[0] = load_part(keys + i, n); }, sum);
    }
    scale_scores(blocks, now, sum[0]);
    keep_scores(sight, now, sum[0], scores, top);
    return 1;
}

// scores[register][pair][lane] and the greatest of each pair; -inf where a pair may not see.
template <int Pairs, class Stored>
void score(const Pieces<Stored> &pieces, const Sight<Pairs> &sight, const float *queries, float *scores,
           float *greatest) {
    const HeadBlocks<Stored> &blocks = pieces.own.blocks;
    int size = blocks.block_size * blocks.head_dim;
    Lanes top[Pairs];
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) top[p] = splat(kHidden);
    Tokens<Stored> now = blocks.of_block(pieces.own.first);
    int fetched = now.block, last_block = pieces.own.end - 1;
    while (now.count > 0) {
        Tokens<Stored> next = blocks.after(now, last_block);
        for (; fetched <= next.block; fetched++) {
            const Stored *ahead = pieces.after_keys(fetched);
            if (ahead == nullptr) continue;
            fetch_lines(ahead, size);
            if constexpr (kHasScales<Stored>) fetch_scales(blocks, fetched, ahead);
        }
        int done = score_some(blocks, sight, now, next, queries, scores, top);
        now = done == 1 ? next : blocks.after(next, last_block);
        scores += done * Pairs * kLanes;
    }
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) greatest[p] = max_of(top[p]);
}

// Turns scores into e^(score - greatest) and gives one over their sum and what it begins with.
template <int Pairs>
void weigh(float *scores, int64_t chunks, const float *greatest, const float *begin, float *scale) {
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
    for (int p = 0; p < Pairs; p++) scale[p] = 1.0f / (sum_of(sum[p]) + begin[p]);
}

// Multiplies the weights with the scales of their tokens' values, once their sum is known. Lanes that no pair sees may
// become anything.
template <int Pairs>
void scale_weights(const BlockRange<int8_t> &range, float *weights) {
    const HeadBlocks<int8_t> &blocks = range.blocks;
    for (int block = range.first; block < range.end; block++) {
        const float *scales = blocks.value_scales(block);
        for (int t = 0; t < blocks.block_size; t += kLanes) {
            int count = blocks.block_size - t;
            Lanes scale = count < kLanes ? load_part(scales + t, count) : load(scales + t);
#pragma GCC unroll 16
            for (int p = 0; p < Pairs; p++, weights += kLanes) store(weights, mul(load(weights), scale));
        }
    }
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

// Where a token's weights lie (pair 0's; those of the others follow kLanes apart), and its values from lane d on.
template <int Pairs, class Stored>
struct Mixture {
    const Pieces<Stored> &pieces;
    const float *weights;  // of the first register of the first block
    int d, rest;

    const HeadBlocks<Stored> &blocks() const { return pieces.own.blocks; }
    int block_of(int token) const { return token / blocks().block_size; }
    int within(int token) const { return token % blocks().block_size; }

    // What is fetched beside this token's values, while the first lanes are mixed: as much, and no more at once, or
    // loads wait behind it. Null where there is nothing.
    const Stored *after(int token) const {
        const Stored *ahead = d == 0 ? pieces.after_values(block_of(token)) : nullptr;
        return ahead == nullptr ? ahead : ahead + within(token) * blocks().head_dim;
    }
    const Stored *value(int token) const { return blocks().value(block_of(token), within(token)) + d; }
    const float *weight(int token) const {
        int at = (block_of(token) - pieces.own.first) * blocks().chunks() + within(token) / kLanes;
        return weights + static_cast<int64_t>(at) * Pairs * kLanes + within(token) % kLanes;
    }
    // How many tokens from this one on, or up to `end`, lie beside each other in a block and in a register of weights.
    int together(int token, int end) const {
        int in_block = blocks().block_size - within(token), lanes = kLanes - within(token) % kLanes;
        int count = in_block < lanes ? in_block : lanes;
        return end - token < count ? end - token : count;
    }
};

// Adds tokens that all pairs see. The sums are taken out of memory: in an array that is someone else's the compiler
// keeps them there.
template <int Pairs, int Wide, class Stored>
[[gnu::noinline]] void mix_seen(Mixture<Pairs, Stored> from, int token, int end, Lanes (&mixed)[Pairs][Wide]) {
    int width = from.blocks().head_dim;
    Lanes sum[Pairs][Wide];
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) {
#pragma GCC unroll 4
        for (int j = 0; j < Wide; j++) sum[p][j] = mixed[p][j];
    }
    for (int count; token < end; token += count) {
        const Stored *value = from.value(token);
        const float *weight = from.weight(token);
        count = from.together(token, end);
        const Stored *ahead = from.after(token);
        for (const float *stop = weight + count; weight != stop; weight++, value += width) {
            if (ahead != nullptr) {
                fetch_lines(ahead, width);
                ahead += width;
            }
            Lanes v[Wide];
            load_values<Wide>(value, from.rest, v);
#pragma GCC unroll 16
            for (int p = 0; p < Pairs; p++) {
                Lanes w = splat(weight[p * kLanes]);
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

// The same for tokens that some pairs may not see. Not adding is not the same as adding 0 x value: the value may be
// infinite.
template <int Pairs, int Wide, class Stored>
void mix_where_seen(Mixture<Pairs, Stored> from, int token, int end, const Sight<Pairs> &sight,
                    Lanes (&mixed)[Pairs][Wide]) {
    for (; token < end; token++) {
        const float *weight = from.weight(token);
        Lanes v[Wide];
        load_values<Wide>(from.value(token), from.rest, v);
        for (int p = 0; p < Pairs; p++) {
            if (token < sight.begin[p] || token >= sight.end[p]) continue;
            for (int j = 0; j < Wide; j++) mixed[p][j] = fma(splat(weight[p * kLanes]), v[j], mixed[p][j]);
        }
    }
}

// Mixes `Wide` registers of the values, lanes d .. of the head.
template <int Pairs, int Wide, class Stored>
void mix(const Pieces<Stored> &pieces, const Sight<Pairs> &sight, const float *weights, int d, int rest,
         Lanes (&mixed)[Pairs][Wide]) {
    for (int p = 0; p < Pairs; p++) {
        for (int j = 0; j < Wide; j++) mixed[p][j] = splat(0.0f);
    }
    Mixture<Pairs, Stored> from = {pieces, weights, d, rest};
    mix_where_seen(from, sight.first, sight.common_begin, sight, mixed);
    mix_seen(from, sight.common_begin, sight.common_end, mixed);
    mix_where_seen(from, sight.common_end, sight.last, sight, mixed);
}

template <int Pairs, int Wide, class Stored, class Out>
void mix_lanes(const Pieces<Stored> &pieces, const Sight<Pairs> &sight, const float *weights,
               const float *scale, int d, int rest, Out *const *out) {
    Lanes mixed[Pairs][Wide];
    mix<Pairs, Wide>(pieces, sight, weights, d, rest, mixed);
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
void attend(const Pieces<Stored> &pieces, const Sight<Pairs> &sight, const ScoreRules &rules,
            const float *const *query, float *scratch, Out *const *out) {
    const HeadBlocks<Stored> &blocks = pieces.own.blocks;
    constexpr int kWide = 4 * Pairs <= kSums ? 4 : 2 * Pairs <= kSums ? 2 : 1;
    float *scores = scratch + blocks.head_dim * Pairs;
    for (int p = 0; p < Pairs; p++) {
        for (int d = 0; d < blocks.head_dim; d++) scratch[d * Pairs + p] = query[p][d];
    }
    float greatest[Pairs], begin[Pairs] = {}, scale[Pairs];
    score<Pairs>(pieces, sight, scratch, scores, greatest);
    int64_t registers = static_cast<int64_t>(pieces.own.end - pieces.own.first) * blocks.chunks();
    if (rules.any()) rules.apply_to(scores, registers, greatest, begin);
    weigh<Pairs>(scores, registers, greatest, begin, scale);
    if constexpr (kHasScales<Stored>) scale_weights<Pairs>(pieces.own, scores);
    int d = 0, width = blocks.head_dim;
    for (; d + kWide * kLanes <= width; d += kWide * kLanes) {
        mix_lanes<Pairs, kWide>(pieces, sight, scores, scale, d, kLanes, out);
    }
    for (; d + kLanes <= width; d += kLanes) mix_lanes<Pairs, 1>(pieces, sight, scores, scale, d, kLanes, out);
    if (d < width) mix_lanes<Pairs, 1>(pieces, sight, scores, scale, d, width - d, out);
}

}  // namespace
}  // namespace diptych
