// The recurrent part of a layer:
//
//   product | [product in fp32] | what its kind computes | [last layer: rows that are wanted] | product + residual
//
// A kind has a body here and its sizes in recurrent_kinds.cpp. A body begins with what all rows' products gave in
// StepState::recurrent, and leaves the input of the last product there.
#pragma once

#include "gated_delta.h"
#include "mamba.h"
#include "mamba2.h"
#include "residual.h"
#include "short_conv.h"

namespace diptych {
namespace {

template <class Kind>
using RecurrentBody = void (*)(StepState &step, const Layer &layer);

// By DiptychRecurrence.
template <class Kind>
constexpr RecurrentBody<Kind> kRecurrentBodies[] = {nullptr, run_short_conv<Kind>, run_gated_delta<Kind>, run_mamba2<Kind>,
                                                    run_mamba<Kind>};

// What a layer's recurrence makes of normed rows.
template <class Kind>
void project_recurrence(StepState &step, const Layer &layer) {
    ThreadTeam &team = step.model->team;
    int rows = static_cast<int>(step.rows.size());
    const RecurrentStep &own = step.recurrent;
    auto place = [&](int row, int column) { return own.in_row(row) + column; };
    product_of_normed<Kind>(
        step, layer.recurrent.in, rows,
        [&](int row, int column, float *sums) { std::memcpy(place(row, column), sums, kColumns * sizeof(float)); },
        [&](int row, int column) { fetch_to_write(place(row, column), kColumns); });
    team.barrier();
    if (layer.recurrent.side.data == nullptr) return;
    const void *input = step.experts.normed != nullptr ? step.experts.normed : step.normed;
    int64_t begin = side_begin(layer);
    linear<Fp32>(
        step, layer.recurrent.side, input, step.hidden_stride, rows,
        [&](int row, int column, float *sums) {
            std::memcpy(place(row, column) + begin, sums, kColumns * sizeof(float));
        },
        [](int, int) {});
    team.barrier();
}

// Zeros behind the numbers of each row of the last product's input, where another layer may have left some.
template <class Kind>
void clear_padding(StepState &step, const Layer &layer) {
    const RecurrentStep &own = step.recurrent;
    int64_t width = layer.recurrent.out.in, bytes = (own.out_stride - width) * static_cast<int64_t>(sizeof(typename Kind::Value));
    if (!own.padded) return;
    share_rows(step, RowGroups(step, static_cast<int64_t>(step.rows.size()), Kind::kRows), kRowChunk, [&](int64_t row) {
        std::memset(static_cast<void *>(own.out_row<Kind>(row) + width), 0, static_cast<size_t>(bytes));
    });
    step.model->team.barrier();
}

template <class Kind>
void run_recurrence(StepState &step, const Layer &layer) {
    clear_padding<Kind>(step, layer);
    kRecurrentBodies<Kind>[layer.own.recurrent.kind](step, layer);
}

// Moves the rows of a set to the places that they have in it. They are few, and none moves up.
template <class Kind>
void gather_outputs(StepState &step, const RowSet &set) {
    ThreadTeam &team = step.model->team;
    const RecurrentStep &own = step.recurrent;
    auto bytes = static_cast<size_t>(own.out_stride) * sizeof(typename Kind::Value);
    auto tickets = team.even(1);
    for (auto run = team.take_run(tickets, 1); run.begin < run.end; run = team.take_run(tickets, 1)) {
        for (int64_t place = 0; place < set.size(); place++) {
            int64_t row = set.row(place);
            if (row != place) std::memcpy(own.out_row<Kind>(place), own.out_row<Kind>(row), bytes);
        }
    }
    team.barrier();
}

// Adds what a recurrence gives to the stream, or to what attention left beside it.
template <class Kind>
Update add_recurrence(StepState &step, const RowSet &set, const Layer &layer, const Update &beside) {
    const RecurrentStep &own = step.recurrent;
    bool apart = !layer.attention_output_norm.empty();
    if (&set != &step.all) gather_outputs<Kind>(step, set);
    Changes<Kind> none(step);
    add_to_stream<Kind>(step, set, layer.recurrent.out, own.out, own.out_stride, apart, none, beside.rows);
    step.model->team.barrier();
    return {apart, false, false, apart ? &layer.attention_output_norm : nullptr};
}

}  // namespace
}  // namespace diptych
