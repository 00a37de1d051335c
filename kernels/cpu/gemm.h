// Products of activations with packed weights: tiles of a few rows by 32 columns.
//
// Batch invariance rests on this file: every output is one sum over the depth from first to last, in a
// register of its own, whatever the number of rows, threads or neighbours.
#pragma once

#include <algorithm>
#include <type_traits>

#include "bf16.h"
#include "row_groups.h"
#include "step_state.h"
#include "tuning.h"

namespace diptych {
namespace {

constexpr int kRegisters = kColumns / kLanes;  // that hold one row of a tile

// Weights come from memory, and the hardware's own fetching stops at page borders. Ahead: in bytes; Locality: 3
// for the first cache, 2 for the second. Which pair is best was measured, and differs by kernel.
template <int Ahead, int Locality>
inline void fetch(const void *weights) {
    __builtin_prefetch(static_cast<const char *>(weights) + Ahead, 0, Locality);
    __builtin_prefetch(static_cast<const char *>(weights) + Ahead + 64, 0, Locality);
}

// Calls f with the compile-time number that equals n, 1 .. Most.
template <int Most, class F>
inline void with_count(int n, F f) {
    if (n == Most) {
        f(std::integral_constant<int, Most>());
    } else if constexpr (Most > 1) {
        with_count<Most - 1>(n, f);
    }
}

template <int Rows>
inline void store_tile(const Lanes (&sum)[Rows][kRegisters], float *out) {
    for (int m = 0; m < Rows; m++) {
        for (int j = 0; j < kRegisters; j++) store(out + m * kColumns + j * kLanes, sum[m][j]);
    }
}

// Defaults of all kinds.
struct AnyKind {
    static constexpr int kReadsCodes = 0;  // rows of the products that do, where a matrix has codes beside its bytes
};

// Weights, keys and values fp32.
struct Fp32 : AnyKind {
    using Value = float;  // what the phases before a product write
    using Input = float;  // what the product reads
    using Stored = float;
    static constexpr int kRows = kGemmRows;
    static constexpr bool kEven = true;

    static void begin(int) {}
    static void end() {}
    static int64_t input_bytes(int64_t depth) { return depth * static_cast<int64_t>(sizeof(Input)); }

    template <int Rows>
    static void multiply(const float *input, int64_t stride, const float *weight, int depth, float *out) {
        Lanes sum[Rows][kRegisters];
        for (int m = 0; m < Rows; m++) {
            for (int j = 0; j < kRegisters; j++) sum[m][j] = splat(0.0f);
        }
        for (int k = 0; k < depth; k++, weight += kColumns) {
            if (Rows > kFewRows) fetch<2048, 3>(weight);
            Lanes w[kRegisters];
#pragma GCC unroll 8
            for (int j = 0; j < kRegisters; j++) w[j] = load(weight + j * kLanes);
#pragma GCC unroll 16
            for (int m = 0; m < Rows; m++) {
                Lanes x = splat(input[m * stride + k]);
#pragma GCC unroll 8
                for (int j = 0; j < kRegisters; j++) sum[m][j] = fma(x, w[j], sum[m][j]);
            }
        }
        store_tile<Rows>(sum, out);
    }

    // out[rows][32] = input[rows][depth] x one block of a matrix
    static void tile(const float *input, int64_t stride, int rows, const Linear &matrix, int64_t block, float *out) {
        const auto *weight = static_cast<const float *>(matrix.block(block));
        with_count<kRows>(rows, [&](auto n) { multiply<n()>(input, stride, weight, matrix.depth, out); });
    }
};

// Weights, keys and values bf16, widened in registers; inputs stay fp32.
struct WidenedBf16 : AnyKind {
    using Value = float;
    using Input = float;
    using Stored = bf16;
    static constexpr int kRows = kGemmRows;
    static constexpr bool kEven = true;

    static void begin(int) {}
    static void end() {}
    static int64_t input_bytes(int64_t depth) { return depth * static_cast<int64_t>(sizeof(Input)); }

    template <int Rows>
    static void multiply(const float *input, int64_t stride, const bf16 *weight, int depth, float *out) {
        Lanes sum[Rows][kRegisters];
        for (int m = 0; m < Rows; m++) {
            for (int j = 0; j < kRegisters; j++) sum[m][j] = splat(0.0f);
        }
        for (int k = 0; k < depth; k += 2, weight += 2 * kColumns) {
            if (Rows > kFewRows) fetch<2048, 3>(weight);
            Lanes even[kRegisters], odd[kRegisters];
#pragma GCC unroll 8
            for (int j = 0; j < kRegisters; j++) {
                even[j] = load_even(weight + 2 * j * kLanes);
                odd[j] = load_odd(weight + 2 * j * kLanes);
            }
#pragma GCC unroll 16
            for (int m = 0; m < Rows; m++) {
                Lanes x = splat(input[m * stride + k]), next = splat(input[m * stride + k + 1]);
#pragma GCC unroll 8
                for (int j = 0; j < kRegisters; j++) sum[m][j] = fma(next, odd[j], fma(x, even[j], sum[m][j]));
            }
        }
        store_tile<Rows>(sum, out);
    }

    static void tile(const float *input, int64_t stride, int rows, const Linear &matrix, int64_t block, float *out) {
        const auto *weight = static_cast<const bf16 *>(matrix.block(block));
        with_count<kRows>(rows, [&](auto n) { multiply<n()>(input, stride, weight, matrix.depth, out); });
    }
};

// What kinds with quantised inputs share: rows lie in panels of `Rows`, side by side, one entry of each after another,
// as a tile reads them. Keys and values are bf16.
template <class Entry, int Rows>
struct Panels : AnyKind {
    using Value = float;
    using Input = Entry;
    using Stored = bf16;
    static constexpr int kRows = Rows;
    static constexpr bool kEven = false;  // tiles are the panels that rows were quantised into

    static void begin(int) {}
    static void end() {}

    // The first entry of row `row`, which has `stride` of them at most; the next ones are kRows apart.
    static Entry *place(Entry *rows, int64_t stride, int64_t row) {
        return rows + row / kRows * kRows * stride + row % kRows;
    }
};

// Rows that are multiplied with all of a matrix before the next ones are: their inputs stay in the second cache.
constexpr int64_t kInputBytes = 384 << 10;

// How the rows of a product are cut: into blocks of `block` rows, and these into tiles of `height`.
struct RowCut {
    int height, block, blocks;

    template <class Kind>
    static RowCut of(int rows, int64_t row_bytes) {
        int64_t most = kInputBytes / row_bytes / Kind::kRows * Kind::kRows;
        if (most < 4 * Kind::kRows) most = 4 * Kind::kRows;
        int blocks = static_cast<int>((rows + most - 1) / most);
        int tiles = (rows + Kind::kRows - 1) / Kind::kRows;
        // Even tiles where every row has its price: 13 rows are 7 and 6, not 12 and 1.
        int height = Kind::kEven ? (rows + tiles - 1) / tiles : Kind::kRows;
        int tiles_a_block = (tiles + blocks - 1) / blocks;
        return {height, height * tiles_a_block, blocks};
    }
};

// Rows x tickets of a run, at most: half a millisecond of work, which a guest ends before it leaves.
constexpr int kRunRows = 2048;

// `all`: rows of the product, of which these are some.
template <class Kind>
inline void multiply_tile(const typename Kind::Input *input, int64_t stride, int rows, [[maybe_unused]] int all,
                          const Linear &matrix, int64_t block, float *out) {
    if constexpr (Kind::kReadsCodes > 0) {
        bool coded = all <= Kind::kReadsCodes && matrix.codes != nullptr;
        if (coded) return Kind::coded_tile(input, rows, matrix, block, out);
    }
    Kind::tile(input, stride, rows, matrix, block, out);
}

// All rows of a product. Calls done(row, first column, 32 sums) for every row and block of columns; the
// biases are in the sums. Where there are many rows it calls ahead(row, first column) a tile before, so that the place
// of the sums can be fetched: its lines lie a row apart, which the hardware does not see coming, and do not stay in the
// second cache from one block of columns to the next.
template <class Kind, class Done, class Ahead>
void linear(StepState &step, const Linear &matrix, const void *input, int64_t stride, int rows, Done done,
            Ahead ahead) {
    if (rows == 0) return;
    const auto *in = static_cast<const typename Kind::Input *>(input);
    RowGroups groups(step, rows, Kind::kRows);
    auto cut_of = [&](int64_t begin, int64_t end) {
        return RowCut::of<Kind>(static_cast<int>(end - begin), Kind::input_bytes(matrix.depth));
    };
    alignas(64) float out[Kind::kRows * kColumns];
    Kind::begin(rows);
    // Of rows `begin` to `last`, cut like this.
    auto multiply = [&](int64_t begin, int64_t last, const RowCut &cut, int64_t ticket) {
        int64_t block = ticket % matrix.blocks;
        const float *bias = matrix.bias != nullptr ? matrix.bias + block * kColumns : nullptr;
        int first = static_cast<int>(begin + ticket / matrix.blocks * cut.block);
        int end = static_cast<int>(last - first < cut.block ? last : first + cut.block);
        for (int row = first; row < end; row += cut.height) {
            int count = end - row < cut.height ? end - row : cut.height;
            for (int m = 0; rows > kManyRows && m < count; m++) ahead(row + m, static_cast<int>(block) * kColumns);
            multiply_tile<Kind>(in + row * stride, stride, count, rows, matrix, block, out);
            for (int m = 0; m < count; m++) {
                float *sums = out + m * kColumns;
                if (bias != nullptr) {
                    for (int j = 0; j < kColumns; j += kLanes) store(sums + j, add(load(sums + j), load(bias + j)));
                }
                done(row + m, static_cast<int>(block) * kColumns, sums);
            }
        }
    };
    ThreadTeam &team = step.model->team;
    int64_t longest = std::max(kRunRows * groups.count / rows, 1);
    if (groups.count == 1) {  // ranks have columns of their own instead
        RowCut cut = cut_of(0, rows);
        auto tickets = team.even(int64_t{matrix.blocks} * cut.blocks);
        for (auto run = team.take_run(tickets, longest); run.begin < run.end; run = team.take_run(tickets, longest)) {
            for (int64_t ticket = run.begin; ticket < run.end; ticket++) multiply(0, rows, cut, ticket);
        }
        return;
    }
    auto tickets = groups.tickets(
        [&](int64_t begin, int64_t end) { return int64_t{matrix.blocks} * cut_of(begin, end).blocks; });
    for (auto run = team.take_run(tickets, longest); run.begin < run.end; run = team.take_run(tickets, longest)) {
        int64_t begin = groups.begin(run.group), end = groups.end(run.group), before = tickets.begin(run.group);
        RowCut cut = cut_of(begin, end);
        for (int64_t ticket = run.begin; ticket < run.end; ticket++) multiply(begin, end, cut, ticket - before);
    }
}

}  // namespace
}  // namespace diptych
