// The feed-forward of a layer: one gated or ungated matrix pair, or experts.
#pragma once

#include "activation.h"
#include "experts.h"
#include "residual.h"

namespace diptych {
namespace {

// The first product and its activation: `inner` [rows, stride].
template <class Kind>
void run_gate_up(StepState &step, int rows, const Linear &matrix, void *inner, int64_t stride,
                 const Changes<Kind> &changes) {
    changes.shrink(step.normed, step.hidden_stride);
    const DiptychShape &shape = step.model->shape;
    auto *values = static_cast<typename Kind::Value *>(inner);
    int shift = halvings(shape);
    bool usual = is_silu_gated(shape);
    auto place = [=](int row, int column) { return values + row * stride + (column >> shift); };
    product_of_normed<Kind>(
        step, matrix, rows,
        [=, &shape, &changes](int row, int column, float *sums) {
            changes.expand(row, column, sums);
            activate(shape, usual, sums, place(row, column));
        },
        [=](int row, int column) { fetch_to_write(place(row, column), kColumns >> shift); });
    step.model->team.barrier();
}

// Begins with normed rows, and tells what it leaves beside the stream.
template <class Kind>
Update run_dense(StepState &step, const RowSet &set, const Layer &layer, int index) {
    Changes<Kind> gate_up(step, set, index, DIPTYCH_GATE_UP), down(step, set, index, DIPTYCH_DOWN);
    bool apart = !layer.feed_forward_output_norm.empty();
    run_gate_up<Kind>(step, static_cast<int>(set.size()), layer.gate_up, step.inner.get(), step.inner_stride,
                      gate_up);
    add_to_stream<Kind>(step, set, layer.down, step.inner, step.inner_stride, apart, down);
    step.model->team.barrier();
    return {apart, false, false, apart ? &layer.feed_forward_output_norm : nullptr};
}

template <class Kind>
Update run_experts(StepState &step, const RowSet &set, const Layer &layer) {
    int rows = static_cast<int>(set.size());
    ExpertSet all{layer.experts, 0};
    route(step, layer, rows);
    gather_rows<Kind>(step, all, rows);
    run_expert_products<Kind>(step, all, rows);
    bool shared = layer.shared_down.data != nullptr;
    if (shared) {
        const ExpertStep &experts = step.experts;
        Changes<Kind> none(step);
        run_gate_up<Kind>(step, rows, layer.shared_gate_up, experts.shared_inner.get(), experts.shared_stride,
                          none);
        add_to_stream<Kind>(step, set, layer.shared_down, experts.shared_inner, experts.shared_stride, true, none);
        step.model->team.barrier();
    }
    bool normed = !layer.feed_forward_output_norm.empty();
    return {shared, true, false, normed ? &layer.feed_forward_output_norm : nullptr};
}

template <class Kind>
Update run_feed_forward(StepState &step, const RowSet &set, const Layer &layer, int index, const Update &update) {
    bool experts = layer.own.experts != 0;
    norm_rows<Kind>(step, set, layer.post_norm, update, experts ? step.experts.normed : nullptr);
    step.model->team.barrier();
    return experts ? run_experts<Kind>(step, set, layer) : run_dense<Kind>(step, set, layer, index);
}

}  // namespace
}  // namespace diptych
