// Attention by dot products of bf16 pairs (vdpbf16ps), where keys and values are bf16, or int8 beside a model of bf16,
// and a block holds whole registers of tokens: half the instructions of widening every key and value first, a third of
// the time. A code of int8 is a bf16, exactly; scales are as in attention.h.
//
// Scores multiply pairs of lanes of the head, mixing multiplies pairs of neighbouring tokens. What a query may not
// see takes part as 0 x 0, so that its bits are, here too, those of a task of its own: an even token and the odd
// one after it always go together, whatever else is in the task.
#pragma once

#include "attention.h"

namespace diptych {
namespace {

constexpr int kPieceLanes = 32;  // lanes of the head in one register of bf16

inline __m512bh pair_everywhere(const void *pair) {
    int32_t both;
    std::memcpy(&both, pair, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

// Two rows of 16 tokens as 16 pairs.
inline __m512bh pair_rows(const bf16 *even, const bf16 *odd, __m512i order) {
    __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(even)));
    both = _mm512_inserti64x4(both, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(odd)), 1);
    return (__m512bh)_mm512_permutexvar_epi16(order, both);
}

// 16 codes as float32: all their bits lie in the upper half.
inline __m512i widen_codes(__m128i codes) {
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)));
}

// Pairs of the upper halves.
inline __m512i pair_upper(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(even, 16), odd);
}

inline __m512bh pair_rows(const int8_t *even, const int8_t *odd, __m512i) {
    return (__m512bh)pair_upper(widen_codes(_mm_loadu_si128(reinterpret_cast<const __m128i *>(even))),
                                widen_codes(_mm_loadu_si128(reinterpret_cast<const __m128i *>(odd))));
}

inline __m512i pairing_order() {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
}

// queries [head_dim / 2][Pairs] of two bf16 each. Even and odd pairs of lanes are summed apart: a single sum would
// wait for itself. As much as is read of the keys is fetched from `ahead`, unless that is null.
template <int Pairs, class Stored>
inline void dot_pairs(const HeadBlocks<Stored> &blocks, const bf16 *queries, const Stored *keys, const Stored *ahead,
                      Lanes (&sum)[Pairs]) {
    const __m512i order = pairing_order();
    Lanes other[Pairs];
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) sum[p] = other[p] = splat(0.0f);
    int row = blocks.block_size, d = 0;
    for (; d + 4 <= blocks.head_dim; d += 4, keys += 4 * row, queries += 4 * Pairs) {
        if (ahead != nullptr) fetch_lines(ahead + d * kLanes, 4 * kLanes);
        __m512bh even = pair_rows(keys, keys + row, order), odd = pair_rows(keys + 2 * row, keys + 3 * row, order);
#pragma GCC unroll 16
        for (int p = 0; p < Pairs; p++) {
            sum[p] = _mm512_dpbf16_ps(sum[p], even, pair_everywhere(queries + 2 * p));
            other[p] = _mm512_dpbf16_ps(other[p], odd, pair_everywhere(queries + 2 * (Pairs + p)));
        }
    }
    if (d < blocks.head_dim) {
        __m512bh even = pair_rows(keys, keys + row, order);
#pragma GCC unroll 16
        for (int p = 0; p < Pairs; p++) sum[p] = _mm512_dpbf16_ps(sum[p], even, pair_everywhere(queries + 2 * p));
    }
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) sum[p] = add(sum[p], other[p]);
}

template <int Pairs, class Stored>
void score_pairs(const Pieces<Stored> &pieces, const Sight<Pairs> &sight, const bf16 *queries, float *scores,
                 float *greatest) {
    const HeadBlocks<Stored> &blocks = pieces.own.blocks;
    Lanes top[Pairs];
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) top[p] = splat(kHidden);
    for (int block = pieces.own.first; block < pieces.own.end; block++) {
        const Stored *ahead = pieces.after_keys(block);
        if constexpr (kHasScales<Stored>) {
            if (ahead != nullptr) fetch_scales(blocks, block, ahead);
        }
        for (int c = 0; c < blocks.chunks(); c++, scores += Pairs * kLanes) {
            int first = block * blocks.block_size + c * kLanes;
            Tokens<Stored> tokens = {block, first, kLanes, blocks.keys(block) + c * kLanes};
            Lanes sum[Pairs];
            dot_pairs<Pairs>(blocks, queries, tokens.keys, ahead, sum);
            if (ahead != nullptr) ahead += blocks.head_dim * kLanes;
            scale_scores(blocks, tokens, sum);
            keep_scores(sight, tokens, sum, scores, top);
        }
    }
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) greatest[p] = max_of(top[p]);
}

// e^x for x of at most 0 within 3e-5, which bf16 cannot tell from exact; below -100 less than bf16 can hold.
inline Lanes short_exp(Lanes x) {
    Lanes bounded = max(splat(-100.0f), x);
    Lanes n = round(mul(bounded, splat(1.44269504f)));
    Lanes r = fma(n, splat(-0.693147181f), bounded);
    Lanes p = fma(splat(4.1666668e-2f), r, splat(1.6666667e-1f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    return times_power_of_two(p, n);
}

// Where a weight is more than bf16 rounds to 0, which that of a hidden token is not.
inline __mmask16 has_weight(Lanes weight) {
    return _mm512_cmp_ps_mask(weight, splat(std::numeric_limits<float>::min()), _CMP_NLT_UQ);
}

// Turns scores into weights, bf16 in the first half of each register's place, and gives one over their sum and what it
// begins with. Scales of values come after the sum.
template <int Pairs, class Stored>
void weigh_pairs(const BlockRange<Stored> &range, float *scores, const float *greatest, const float *begin,
                 float *scale) {
    Lanes sum[Pairs];
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) sum[p] = splat(0.0f);
    for (int block = range.first; block < range.end; block++) {
        for (int c = 0; c < range.blocks.chunks(); c++) {
            Lanes of_values = splat(1.0f);
            if constexpr (kHasScales<Stored>) of_values = load(range.blocks.value_scales(block) + c * kLanes);
#pragma GCC unroll 16
            for (int p = 0; p < Pairs; p++, scores += kLanes) {
                Lanes weight = short_exp(sub(load(scores), splat(greatest[p])));
                sum[p] = add(sum[p], weight);
                // A lane that holds nothing may have any scale.
                if constexpr (kHasScales<Stored>) weight = _mm512_maskz_mul_ps(has_weight(weight), weight, of_values);
                store(reinterpret_cast<bf16 *>(scores), weight);
            }
        }
    }
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) scale[p] = 1.0f / (sum_of(sum[p]) + begin[p]);
}

// Two tokens' values of up to 32 lanes of the head, paired. Within quarters of the register lanes 0 .. 3 go to
// `low` and 4 .. 7 to `high`: the order is put right when all is mixed.
struct PairedValues {
    __m512bh low, high;

    PairedValues(const bf16 *even, const bf16 *odd, __mmask32 lanes) {
        __m512i a = _mm512_maskz_loadu_epi16(lanes, even), b = _mm512_maskz_loadu_epi16(lanes, odd);
        low = (__m512bh)_mm512_unpacklo_epi16(a, b);
        high = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }

    PairedValues(const int8_t *even, const int8_t *odd, __mmask32 lanes) {
        __m256i a = _mm256_maskz_loadu_epi8(lanes, even), b = _mm256_maskz_loadu_epi8(lanes, odd);
        // Fours of lanes go to `low` and `high` by turns.
        const __m256i turns = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
        a = _mm256_permutevar8x32_epi32(a, turns), b = _mm256_permutevar8x32_epi32(b, turns);
        low = (__m512bh)pair_upper(widen_codes(_mm256_castsi256_si128(a)), widen_codes(_mm256_castsi256_si128(b)));
        high = (__m512bh)pair_upper(widen_codes(_mm256_extracti128_si256(a, 1)),
                                    widen_codes(_mm256_extracti128_si256(b, 1)));
    }
};

// The same with one of the two tokens, or both, out of sight.
inline __m512bh seen_only(__m512bh values, bool even, bool odd) {
    __mmask32 seen = (even ? 0x55555555u : 0u) | (odd ? 0xaaaaaaaau : 0u);
    return (__m512bh)_mm512_maskz_mov_epi16(seen, (__m512i)values);
}

template <int Pairs, int Wide>
struct Mixed {
    Lanes low[Pairs][Wide], high[Pairs][Wide];
};

// Adds one block of tokens; `weights` are those of its first token. `ahead` as in dot_pairs.
template <int Pairs, int Wide, class Stored>
inline void mix_block(const HeadBlocks<Stored> &blocks, const Sight<Pairs> &sight, int block, const float *weights,
                      int d, __mmask32 lanes, const Stored *ahead, Mixed<Pairs, Wide> &mixed) {
    int base = block * blocks.block_size, width = blocks.head_dim;
    bool open = base >= sight.common_begin && base + blocks.block_size <= sight.common_end;
    for (int t = 0; t < blocks.block_size; t += 2) {
        if (base + t >= sight.last) break;
        if (ahead != nullptr) fetch_lines(ahead + t * width, 2 * width);
        const Stored *value = blocks.value(block, t) + d;
        const auto *weight = reinterpret_cast<const bf16 *>(weights + t / kLanes * Pairs * kLanes) + t % kLanes;
#pragma GCC unroll 2
        for (int i = 0; i < Wide; i++) {
            PairedValues v(value + i * kPieceLanes, value + width + i * kPieceLanes, lanes);
#pragma GCC unroll 16
            for (int p = 0; p < Pairs; p++) {
                __m512bh low = v.low, high = v.high;
                if (!open) {
                    bool even = base + t >= sight.begin[p] && base + t < sight.end[p];
                    bool odd = base + t + 1 >= sight.begin[p] && base + t + 1 < sight.end[p];
                    if (!even && !odd) continue;
                    low = seen_only(low, even, odd);
                    high = seen_only(high, even, odd);
                }
                __m512bh w = pair_everywhere(weight + p * 2 * kLanes);
                mixed.low[p][i] = _mm512_dpbf16_ps(mixed.low[p][i], low, w);
                mixed.high[p][i] = _mm512_dpbf16_ps(mixed.high[p][i], high, w);
            }
        }
    }
}

template <class Out>
inline void store_piece(Lanes low, Lanes high, int count, Out *out) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    Lanes a = _mm512_permutex2var_ps(low, first, high), b = _mm512_permutex2var_ps(low, second, high);
    store_part(out, a, count < kLanes ? count : kLanes);
    if (count > kLanes) store_part(out + kLanes, b, count - kLanes);
}

// Mixes lanes d .. of the head: `Wide` times 32, or the rest of fewer.
template <int Pairs, int Wide, class Stored, class Out>
void mix_lanes_in_pairs(const Pieces<Stored> &pieces, const Sight<Pairs> &sight, const float *weights,
                        const float *scale, int d, Out *const *out) {
    const HeadBlocks<Stored> &blocks = pieces.own.blocks;
    int rest = blocks.head_dim - d < kPieceLanes ? blocks.head_dim - d : kPieceLanes;
    auto lanes = static_cast<__mmask32>((uint64_t{1} << rest) - 1);
    Mixed<Pairs, Wide> mixed;
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) {
#pragma GCC unroll 2
        for (int i = 0; i < Wide; i++) mixed.low[p][i] = mixed.high[p][i] = splat(0.0f);
    }
    int64_t per_block = static_cast<int64_t>(blocks.block_size) * Pairs;
    for (int block = pieces.own.first; block < pieces.own.end; block++) {
        const Stored *ahead = d == 0 ? pieces.after_values(block) : nullptr;
        mix_block<Pairs, Wide>(blocks, sight, block, weights, d, lanes, ahead, mixed);
        weights += per_block;
    }
#pragma GCC unroll 16
    for (int p = 0; p < Pairs; p++) {
#pragma GCC unroll 2
        for (int i = 0; i < Wide; i++) {
            Lanes s = splat(scale[p]);
            store_piece(mul(mixed.low[p][i], s), mul(mixed.high[p][i], s), rest, out[p] + d + i * kPieceLanes);
        }
    }
}

// A query as pairs of bf16, each 2 * Pairs numbers from the one before.
template <int Pairs>
inline void pack_query(const float *query, int width, bf16 *to) {
    bf16 narrowed[kLanes];
    for (int d = 0; d < width; d += kLanes) {
        int count = width - d < kLanes ? width - d : kLanes;
        store(narrowed, load_part(query + d, count));
        for (int i = 0; i < count; i += 2) std::memcpy(to + (d + i) * Pairs, narrowed + i, 2 * sizeof(bf16));
    }
}

// As `attend`.
template <int Pairs, class Stored, class Out>
void attend_in_pairs(const Pieces<Stored> &pieces, const Sight<Pairs> &sight, const ScoreRules &rules,
                     const float *const *query, float *scratch, Out *const *out) {
    const HeadBlocks<Stored> &blocks = pieces.own.blocks;
    constexpr int kWide = Pairs <= 6 ? 2 : 1;  // whose sums fit beside each other
    auto *queries = reinterpret_cast<bf16 *>(scratch);
    for (int p = 0; p < Pairs; p++) pack_query<Pairs>(query[p], blocks.head_dim, queries + 2 * p);
    float *scores = scratch + blocks.head_dim * Pairs;
    float greatest[Pairs], begin[Pairs] = {}, scale[Pairs];
    score_pairs<Pairs>(pieces, sight, queries, scores, greatest);
    int64_t registers = static_cast<int64_t>(pieces.own.end - pieces.own.first) * blocks.chunks();
    if (rules.any()) rules.apply_to(scores, registers, greatest, begin);
    weigh_pairs<Pairs>(pieces.own, scores, greatest, begin, scale);
    int d = 0, width = blocks.head_dim;
    for (; d + kWide * kPieceLanes <= width; d += kWide * kPieceLanes) {
        mix_lanes_in_pairs<Pairs, kWide>(pieces, sight, scores, scale, d, out);
    }
    for (; d < width; d += kPieceLanes) mix_lanes_in_pairs<Pairs, 1>(pieces, sight, scores, scale, d, out);
}

}  // namespace
}  // namespace diptych
