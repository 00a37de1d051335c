// Rows with adapters: what A makes of a product's input, and what B adds to its sums. The base's product is as it is.
//
//   shrink: t[row][k] = scale[k] * sum over i of x[row][i] * a[k][i]     a phase of its own before the product
//   expand: sums[row][j] += sum over k of t[row][k] * b[j][k]            as the product's sums come
//
// Everything is fp32, of A and B as they are stored and of the input before it is quantised. Both sums run in an order
// that depends on the adapter alone, so that a row has the same bits beside any other rows.
#pragma once

#include "adapter.h"
#include "row_groups.h"

namespace diptych {
namespace {

// Parts that the ranks of one tile's A are cut into, for several threads.
constexpr int kShrinkParts = 4;

// Where number i of rank k of neighbouring ranks lies: these take turns by kDepth numbers, so that all of A is read in a
// row. The hardware fetches one run of lines well ahead, and two runs of a kilobyte each not at all.
template <int Ranks>
constexpr int place_in_a(int i, int k) {
    return i / kDepth * (kDepth * Ranks) + k * kDepth + i % kDepth;
}

// to[m][k] = scales[k] * x[m] . a[k] for neighbouring ranks, which share every load of x.
template <int Rows, int Ranks, class Value, class Stored>
inline void shrink_rows(const Value *const (&x)[kAdapterRows], const Stored *a, int width, const float *scales,
                        float *const (&to)[kAdapterRows], int at) {
    Lanes even[Ranks][Rows], odd[Ranks][Rows];
    for (int k = 0; k < Ranks; k++) {
        for (int m = 0; m < Rows; m++) even[k][m] = odd[k][m] = splat(0.0f);
    }
    for (int i = 0; i < width; i += 2 * kLanes) {
        Lanes first[Ranks], second[Ranks];
        for (int k = 0; k < Ranks; k++) {
            const Stored *from = a + place_in_a<Ranks>(i, k);
            first[k] = load(from);
            second[k] = load(from + kLanes);
        }
#pragma GCC unroll 4
        for (int m = 0; m < Rows; m++) {
            Lanes low = load(x[m] + i), high = load(x[m] + i + kLanes);
            for (int k = 0; k < Ranks; k++) {
                even[k][m] = fma(low, first[k], even[k][m]);
                odd[k][m] = fma(high, second[k], odd[k][m]);
            }
        }
    }
    for (int k = 0; k < Ranks; k++) {
        for (int m = 0; m < Rows; m++) to[m][at + k] = scales[k] * sum_of(add(even[k][m], odd[k][m]));
    }
}

template <int Rows, class Value, class Stored>
inline void shrink_ranks(const Value *const (&x)[kAdapterRows], const DiptychChange &change, int begin, int end,
                         float *const (&to)[kAdapterRows]) {
    const auto *a = static_cast<const Stored *>(change.a);
    int k = begin;
    for (; k + 2 <= end; k += 2) {
        shrink_rows<Rows, 2>(x, a + int64_t{change.depth} * k, change.depth, change.scales + k, to, k);
    }
    if (k < end) shrink_rows<Rows, 1>(x, a + int64_t{change.depth} * k, change.depth, change.scales + k, to, k);
}

// Ranks `begin` to `end` of one tile.
template <class Value, class Stored>
void shrink_tile(const StepState &step, const RowSet &set, const AdapterTile &tile, const DiptychChange &change,
                 const Value *values, int64_t stride, int begin, int end) {
    const Value *x[kAdapterRows] = {};
    float *to[kAdapterRows] = {};
    for (int m = 0; m < tile.rows; m++) {
        int64_t place = set.adapted[static_cast<size_t>(tile.first + m)];
        x[m] = values + place * stride;
        to[m] = step.shrunk_row(place);
    }
    switch (tile.rows) {
        case 1: return shrink_ranks<1, Value, Stored>(x, change, begin, end, to);
        case 2: return shrink_ranks<2, Value, Stored>(x, change, begin, end, to);
        case 3: return shrink_ranks<3, Value, Stored>(x, change, begin, end, to);
        default: shrink_ranks<4, Value, Stored>(x, change, begin, end, to);
    }
}

// The part of a change that a strip of columns belongs to, and the strip's number in it; null: none.
struct Strip {
    const DiptychChangePart *part = nullptr;
    int64_t number = 0;

    Strip(const DiptychChange &change, int64_t strip) {
        int p = 0;
        if (change.interleaved) {
            p = static_cast<int>(strip % 2), strip /= 2;
        } else {
            while (p < change.parts && strip >= change.part[p].strips) strip -= change.part[p++].strips;
        }
        if (p < change.parts && change.part[p].b != nullptr && strip < change.part[p].strips) {
            part = &change.part[p], number = strip;
        }
    }
};

// Adds to 16 sums. The strip `ahead` is fetched meanwhile: rows of other adapters come between it and this one, and the
// hardware does not see so many lines of reading at once.
template <class Stored>
inline void expand_strip(const Strip &strip, const float *shrunk, float *sums, int ahead) {
    constexpr int kParts = kAdapterStrip / kLanes;
    constexpr int kLine = 64 / static_cast<int>(sizeof(Stored));
    int size = kAdapterStrip * strip.part->ranks;
    const auto *b = static_cast<const Stored *>(strip.part->b) + strip.number * size;
    for (int i = 0; i < size; i += kLine) __builtin_prefetch(b + ahead * size + i, 0, 2);
    const float *t = shrunk + strip.part->begin;
    Lanes even[kParts], odd[kParts];
    for (int j = 0; j < kParts; j++) even[j] = odd[j] = splat(0.0f);
    int k = 0, ranks = strip.part->ranks;
    for (; k + 2 <= ranks; k += 2, b += 2 * kAdapterStrip) {
        Lanes first = splat(t[k]), second = splat(t[k + 1]);
        for (int j = 0; j < kParts; j++) {
            even[j] = fma(first, load(b + j * kLanes), even[j]);
            odd[j] = fma(second, load(b + kAdapterStrip + j * kLanes), odd[j]);
        }
    }
    for (int j = 0; k < ranks && j < kParts; j++) even[j] = fma(splat(t[k]), load(b + j * kLanes), even[j]);
    for (int j = 0; j < kParts; j++) {
        float *to = sums + j * kLanes;
        store(to, add(load(to), add(even[j], odd[j])));
    }
}

// What the adapters of a set's rows change of one product.
template <class Kind>
class Changes {
  public:
    // `part`: of the rank's own, where ranks share the model.
    Changes(const StepState &step, const RowSet &set, int32_t layer, int32_t which, int32_t part = 0)
        : step_(step), set_(set.adapters.empty() ? nullptr : &set), layer_(layer), which_(which), part_(part) {}

    // Of a product that none can change.
    explicit Changes(const StepState &step) : step_(step), set_(nullptr), layer_(0), which_(0), part_(0) {}

    // Makes t of the product's input, `values` [rows of the set, stride]: a phase, which ends with a barrier.
    void shrink(const void *values, int64_t stride) const {
        if (set_ == nullptr) return;
        using Value = typename Kind::Value;
        const auto *input = static_cast<const Value *>(values);
        ThreadTeam &team = step_.model->team;
        auto tickets = team.even(static_cast<int64_t>(set_->adapter_tiles.size()) * kShrinkParts);
        for (auto run = team.take_run(tickets, kShrinkParts); run.begin < run.end;
             run = team.take_run(tickets, kShrinkParts)) {
            for (int64_t ticket = run.begin; ticket < run.end; ticket++) {
                const AdapterTile &tile = set_->adapter_tiles[static_cast<size_t>(ticket / kShrinkParts)];
                const DiptychChange *change = find_change(*tile.adapter, layer_, part_, which_);
                if (change == nullptr) continue;
                int part = static_cast<int>(ticket % kShrinkParts), pairs = change->ranks / 2;
                int begin = pairs * part / kShrinkParts * 2, end = pairs * (part + 1) / kShrinkParts * 2;
                if (part + 1 == kShrinkParts) end = change->ranks;  // an odd last one, too
                shrink_tile<Value, typename Kind::Stored>(step_, *set_, tile, *change, input, stride, begin, end);
            }
        }
        team.barrier();
    }

    // Adds to 32 sums of a row, by its place, from `column` on.
    void expand(int row, int column, float *sums) const {
        if (set_ != nullptr && set_->adapters[static_cast<size_t>(row)] != nullptr) expand_row(row, column, sums);
    }

  private:
    [[gnu::noinline]] void expand_row(int row, int column, float *sums) const {
        const DiptychChange *change = find_change(*set_->adapters[static_cast<size_t>(row)], layer_, part_, which_);
        if (change == nullptr) return;
        for (int part = 0; part < kColumns / kAdapterStrip; part++) {
            Strip strip(*change, column / kAdapterStrip + part);
            if (strip.part == nullptr) continue;
            int ahead = change->interleaved ? 1 : kColumns / kAdapterStrip;
            expand_strip<typename Kind::Stored>(strip, step_.shrunk_row(row), sums + part * kAdapterStrip, ahead);
        }
    }

    const StepState &step_;
    const RowSet *set_;  // null: no row has an adapter
    int32_t layer_, which_, part_;
};

}  // namespace
}  // namespace diptych
