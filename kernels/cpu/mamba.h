// The layer of Mamba, with Jamba's norms (Gu and Dao 2023; Lieber et al. 2024):
//
//   convolution | product | norms of what steps are made of, of b and of c | product: steps | scan by channels
//
// A row of the first product is the channels' inputs and their gates.
#pragma once

#include "convolved_inputs.h"
#include "products.h"
#include "recurrent_kinds.h"
#include "selective_scan.h"

namespace diptych {
namespace {

// Channels of a slice: those that one rank scans at once.
constexpr int64_t kScanSlice = 64;

// What the layer has in a row of RecurrentStep::scratch, as ScanScratch lays it out.
template <class Kind>
struct ScanPlaces {
    using Value = typename Kind::Value;
    const RecurrentStep &own;
    ScanScratch scratch;

    Value *inner(int64_t row) const { return reinterpret_cast<Value *>(own.scratch_row(row)); }
    float *read(int64_t row) const { return own.scratch_row(row) + scratch.read; }
    Value *rank(int64_t row) const { return reinterpret_cast<Value *>(own.scratch_row(row) + scratch.rank); }
    float *steps(int64_t row) const { return own.scratch_row(row) + scratch.steps; }
    int64_t value_stride() const { return own.scratch_stride * static_cast<int64_t>(sizeof(float) / sizeof(Value)); }
};

// Zeros behind `width` numbers up to the depth of the matrix that reads them.
template <class Value>
void pad_row(Value *row, int64_t width, const Linear &matrix) {
    std::memset(static_cast<void *>(row + width), 0, static_cast<size_t>(matrix.depth - width) * sizeof(Value));
}

// A product of all rows of `values` within a recurrence; `to(row)` gets its numbers, padding included.
template <class Kind, class To>
void product_within(StepState &step, const Linear &matrix, const typename Kind::Value *values, int64_t stride, To to) {
    auto rows = static_cast<int64_t>(step.rows.size());
    ready_rows<Kind>(step, rows, values, stride, matrix.depth);
    product<Kind>(
        step, matrix, values, stride, static_cast<int>(rows),
        [&](int row, int column, float *sums) { std::memcpy(to(row) + column, sums, kColumns * sizeof(float)); },
        [&](int row, int column) { fetch_to_write(to(row) + column, kColumns); });
    step.model->team.barrier();
}

template <class Kind>
void run_mamba(StepState &step, const Layer &layer) {
    const RecurrentStep &own = step.recurrent;
    const DiptychRecurrent &shape = layer.own.recurrent;
    const Recurrence &parts = layer.recurrent;
    ScanPlaces<Kind> places{own, scan_scratch(shape)};
    RowGroups groups(step, static_cast<int64_t>(step.rows.size()), Kind::kRows);
    convolve_inputs(step, layer, 0, [&](int64_t row, int64_t channel, int count, Lanes value) {
        store_some(places.inner(row) + channel, value, count);
        if (channel + count == shape.width) pad_row(places.inner(row), shape.width, parts.inner);
    });
    product_within<Kind>(step, parts.inner, places.inner(0), places.value_stride(),
                         [&](int64_t row) { return places.read(row); });
    share_rows(step, groups, kRowChunk, [&](int64_t row) {
        float *read = places.read(row), *b = read + shape.rank, *c = b + shape.state;
        rms_norm(read, parts.vector(DIPTYCH_STEP_NORM), shape.rank, shape.epsilon, places.rank(row));
        pad_row(places.rank(row), shape.rank, parts.steps);
        rms_norm(b, parts.vector(DIPTYCH_B_NORM), shape.state, shape.epsilon, b);
        rms_norm(c, parts.vector(DIPTYCH_C_NORM), shape.state, shape.epsilon, c);
    });
    step.model->team.barrier();
    product_within<Kind>(step, parts.steps, places.rank(0), places.value_stride(),
                         [&](int64_t row) { return places.steps(row); });
    ScanWeights weights{parts.vector(DIPTYCH_DECAY), parts.vector(DIPTYCH_STEP_BIAS), parts.vector(DIPTYCH_SKIP),
                        shape.state, shape.width};
    int64_t numbers = behind_filter(layer), slices = (shape.width + kScanSlice - 1) / kScanSlice;
    advance_states(step, layer, slices, [&](const StateRun &run, int64_t slice) {
        const float *x = own.in_row(run.first), *b = places.read(run.first) + shape.rank;
        ScanRows rows{x, x + shape.width, places.steps(run.first), own.in_stride, own.scratch_stride,
                      b, b + shape.state, own.scratch_stride, static_cast<int>(run.rows)};
        int64_t end = std::min<int64_t>((slice + 1) * kScanSlice, shape.width);
        scan(weights, rows, slice * kScanSlice, end, run.from + numbers, run.to + numbers, own.out_row<Kind>(run.first),
             own.out_stride);
    });
    step.model->team.barrier();
}

}  // namespace
}  // namespace diptych
