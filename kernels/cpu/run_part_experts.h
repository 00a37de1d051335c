// The experts of a rank's parts: what each part's give for a row goes into the exchange, and nowhere else.
#pragma once

#include "feed_forward.h"
#include "model_share.h"

namespace diptych {
namespace {

// Calls f(number of an own part, its products), each part in a phase of its own: tickets and quantised inputs are those of
// one product.
template <class F>
void for_parts(StepState &step, int index, F f) {
    const auto &parts = step.model->share->layers[static_cast<size_t>(index)];
    for (size_t own = 0; own < parts.size(); own++) {
        if (own > 0) step.model->team.barrier();
        f(static_cast<int32_t>(own), parts[own]);
    }
}

// Adds what a part of the shared expert gives to what lies in the slots of the exchange.
template <class Kind>
void add_shared_part(StepState &step, int rows, const Linear &down, const typename Kind::Value *inner, int32_t part) {
    const ExpertStep &experts = step.experts;
    const RankExchange &exchange = step.model->share->exchange;
    int32_t count = step.model->shape.experts.count;
    ready_rows<Kind>(step, rows, inner, experts.shared_stride, down.depth);
    product<Kind>(
        step, down, inner, experts.shared_stride, rows,
        [&](int row, int column, float *sums) {
            Lanes gate = splat(experts.shared_gate(row, count));
            float *to = exchange.slot(part, row) + column;
            for (int j = 0; j < kColumns; j += kLanes) store(to + j, add(load(to + j), mul(gate, load(sums + j))));
        },
        [&](int row, int column) { fetch_to_write(exchange.slot(part, row) + column, kColumns); });
}

// From normed rows to the slots of all own parts. The shared expert's first product comes before the others, and its last
// one after them: quantised rows of both lie in one place.
template <class Kind>
void run_part_experts(StepState &step, const RowSet &set, const Layer &layer, int index) {
    const ModelShare &share = *step.model->share;
    int rows = static_cast<int>(set.size());
    auto inner_of = [&](int32_t own) {
        auto *inner = static_cast<typename Kind::Value *>(step.experts.shared_inner.get());
        return inner + share.experts[static_cast<size_t>(own)].shared_begin;
    };
    route(step, layer, rows);
    for_parts(step, index, [&](int32_t own, const PartProducts &part) {
        if (!share.has_shared()) return;
        run_gate_up<Kind>(step, rows, part.shared_gate_up, inner_of(own), step.experts.shared_stride, Changes<Kind>(step));
    });
    for_parts(step, index, [&](int32_t own, const PartProducts &part) {
        const PartExperts &of = share.experts[static_cast<size_t>(own)];
        ExpertSet experts{part.experts, of.own.first, of.inner_begin};
        gather_rows<Kind>(step, experts, rows);
        run_expert_products<Kind>(step, experts, rows);
        share_rows(step, RowGroups(step, rows, Kind::kRows), kRowChunk, [&](int64_t row) {
            add_experts(step, row, false, share.exchange.slot(share.part(own), row));
        });
    });
    if (!share.has_shared()) return;
    step.model->team.barrier();
    for_parts(step, index, [&](int32_t own, const PartProducts &part) {
        add_shared_part<Kind>(step, rows, part.shared_down, inner_of(own), share.part(own));
    });
}

}  // namespace
}  // namespace diptych
