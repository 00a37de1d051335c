// Products with rows that the phase before wrote, as they are or quantised.
#pragma once

#include "adapters.h"
#include "gemm.h"

namespace diptych {
namespace {

constexpr int kRowChunk = 4;

// Whether products of `Kind` read something else than what the phases write.
template <class Kind>
constexpr bool kQuantises = !std::is_same<typename Kind::Value, typename Kind::Input>::value;

// A product with the rows that the phase before wrote, or with these quantised.
template <class Kind, class Done, class Ahead>
void product(StepState &step, const Linear &matrix, const void *values, int64_t stride, int rows, Done done,
             Ahead ahead) {
    if constexpr (kQuantises<Kind>) {
        linear<Kind>(step, matrix, step.entries.get(), step.entry_stride, rows, done, ahead);
    } else {
        linear<Kind>(step, matrix, values, stride, rows, done, ahead);
    }
}

// A product with the rows that a norm left.
template <class Kind, class Done, class Ahead>
void product_of_normed(StepState &step, const Linear &matrix, int rows, Done done, Ahead ahead) {
    if constexpr (kQuantises<Kind>) {
        linear<Kind>(step, matrix, step.normed_entries, step.normed_entry_stride, rows, done, ahead);
    } else {
        linear<Kind>(step, matrix, step.normed, step.hidden_stride, rows, done, ahead);
    }
}

// Asks for the cache lines of `count` numbers that are about to be written.
template <class Value>
inline void fetch_to_write(const Value *to, int count) {
    constexpr int kLine = 64 / static_cast<int>(sizeof(Value));
    for (int i = 0; i < count; i += kLine) __builtin_prefetch(to + i, 1, 3);
}

// Makes one finished row of `width` values, padding included, ready for the next product.
template <class Kind>
void ready_row(StepState &step, const typename Kind::Value *values, int64_t row, int64_t width) {
    if constexpr (kQuantises<Kind>) {
        auto *entries = static_cast<typename Kind::Input *>(step.entries.get());
        Kind::ready(values, entries, step.entry_stride, row, width);
    }
}

// The same for the row that a norm left at a place.
template <class Kind>
void ready_normed_row(StepState &step, int64_t place) {
    if constexpr (kQuantises<Kind>) {
        auto *entries = static_cast<typename Kind::Input *>(step.normed_entries);
        const auto *values = static_cast<const typename Kind::Value *>(step.normed) + place * step.hidden_stride;
        Kind::ready(values, entries, step.normed_entry_stride, place, step.hidden_stride);
    }
}

// The same for `rows` rows of `values` [rows, stride], where several ranks wrote parts of each.
template <class Kind>
void ready_rows(StepState &step, int64_t rows, const void *values, int64_t stride, int64_t width) {
    if constexpr (kQuantises<Kind>) {
        const auto *from = static_cast<const typename Kind::Value *>(values);
        RowGroups groups(step, rows, Kind::kRows);
        share_rows(step, groups, rows < kManyRows ? 1 : kRowChunk,
                   [&](int64_t row) { ready_row<Kind>(step, from + row * stride, row, width); });
        step.model->team.barrier();
    }
}

}  // namespace
}  // namespace diptych
