// Experts: each row goes to a few feed-forwards of many, as a router picks.
//
//   router | pick | group rows by expert | gather rows | gate and up, activation | [quantise] | down
//
// A part of a rank's share has some of the experts, or some inner numbers of each; rows have no place at others.
//
// Batch invariance: the router's product is fp32, a row's pick its own, a product's bits do not depend on how many rows
// an expert has (gemm.h), and a row's outputs are added in ascending order of their experts (residual.h).
#pragma once

#include "activation.h"
#include "expert_routing.h"
#include "products.h"

namespace diptych {
namespace {

// Calls f(i) for this rank's share of 0 .. count - 1, few at a time.
template <class F>
void share(StepState &step, int64_t count, int64_t longest, F f) {
    ThreadTeam &team = step.model->team;
    auto tickets = team.even(count);
    for (auto run = team.take_run(tickets, longest); run.begin < run.end; run = team.take_run(tickets, longest)) {
        for (int64_t i = run.begin; i < run.end; i++) f(i);
    }
}

// Where the rows of an expert may begin: with a panel of the kernel's, where inputs lie in panels.
template <class Kind>
constexpr int kPlaceUnit = Kind::kEven ? 1 : Kind::kRows;

// Neighbouring experts that rows are sent to, and where the numbers between their products lie in a place.
struct ExpertSet {
    const std::vector<Expert> &experts;
    int32_t first;  // number of the first one among the model's
    int64_t inner_begin = 0;

    const Expert *find(int32_t number) const {
        int64_t own = int64_t{number} - first;
        return own < 0 || own >= static_cast<int64_t>(experts.size()) ? nullptr : &experts[static_cast<size_t>(own)];
    }
};

// Gives every row a place at each of its experts of a set, in order, and counts what there is to do.
template <class Kind>
void group_rows(StepState &step, const ExpertSet &set, int64_t sent) {
    static_assert(kPlaceUnit<Kind> <= kRowPadding, "so many places were made");
    ExpertStep &experts = step.experts;
    int32_t used = 0;
    int64_t next = 0, gate_up = 0, down = 0;
    std::vector<ExpertRows> &groups = experts.groups;
    std::vector<int32_t> &number = experts.group_of;
    number.assign(static_cast<size_t>(step.model->shape.experts.count), 0);
    for (int64_t n = 0; n < sent; n++) number[static_cast<size_t>(experts.picked[static_cast<size_t>(n)])]++;
    for (int32_t e = 0; e < static_cast<int32_t>(number.size()); e++) {
        int32_t rows = number[static_cast<size_t>(e)];
        const Expert *found = set.find(e);
        number[static_cast<size_t>(e)] = -1;
        if (rows == 0 || found == nullptr) continue;
        const Expert &expert = *found;
        groups[static_cast<size_t>(used)] = {e, 0, next};
        number[static_cast<size_t>(e)] = used++;
        next = round_up(next + rows, kPlaceUnit<Kind>);
        gate_up += int64_t{expert.gate_up.blocks} * RowCut::of<Kind>(rows, Kind::input_bytes(expert.gate_up.depth)).blocks;
        down += int64_t{expert.down.blocks} * RowCut::of<Kind>(rows, Kind::input_bytes(expert.down.depth)).blocks;
    }
    for (int64_t n = 0; n < sent; n++) {
        int32_t own = number[static_cast<size_t>(experts.picked[static_cast<size_t>(n)])];
        int64_t &place = experts.places[static_cast<size_t>(n)];
        if (own < 0) {
            place = -1;
            continue;
        }
        ExpertRows &group = groups[static_cast<size_t>(own)];
        place = group.begin + group.rows++;
    }
    experts.used.store(used, std::memory_order_relaxed);
    experts.gate_up_tickets.store(gate_up, std::memory_order_relaxed);
    experts.down_tickets.store(down, std::memory_order_relaxed);
}

// From normed rows to the experts of each, and their weights.
inline void route(StepState &step, const Layer &layer, int rows) {
    ThreadTeam &team = step.model->team;
    ExpertStep &experts = step.experts;
    const DiptychExperts &shape = step.model->shape.experts;
    auto *logits = static_cast<float *>(experts.logits.get());
    const void *input = experts.normed != nullptr ? experts.normed : step.normed;
    auto place = [&](int row, int column) { return logits + row * experts.router_stride + column; };
    linear<Fp32>(
        step, layer.router, input, step.hidden_stride, rows,
        [&](int row, int column, float *sums) { std::memcpy(place(row, column), sums, kColumns * sizeof(float)); },
        [](int, int) {});
    team.barrier();
    const float *correction = layer.router_correction.empty() ? nullptr : layer.router_correction.data();
    bool gated = layer.router.out > shape.count;
    share(step, rows, kRowChunk, [&](int64_t row) {
        float *own = logits + row * experts.router_stride;
        size_t first = static_cast<size_t>(row * shape.picked);
        pick_experts(shape, own, correction, &experts.picked[first], &experts.weights[first]);
        own[shape.count] = gated ? 1.0f / (1.0f + std::exp(-own[shape.count])) : 1.0f;
    });
    team.barrier();
}

// Gives the rows places, and copies their inputs there.
template <class Kind>
void gather_rows(StepState &step, const ExpertSet &set, int rows) {
    ExpertStep &experts = step.experts;
    int picked = step.model->shape.experts.picked;
    share(step, 1, 1, [&](int64_t) { group_rows<Kind>(step, set, int64_t{rows} * picked); });
    step.model->team.barrier();
    share(step, int64_t{rows} * picked, kRowChunk, [&](int64_t n) {
        int64_t row = n / picked, place = experts.places[static_cast<size_t>(n)];
        if (place < 0) return;
        if constexpr (kQuantises<Kind>) {
            using Input = typename Kind::Input;
            const Input *from = Kind::place(static_cast<Input *>(step.normed_entries), step.normed_entry_stride, row);
            Input *to = Kind::place(static_cast<Input *>(experts.entries.get()), experts.entry_stride, place);
            int64_t count = Kind::entries(step.hidden_stride);
            for (int64_t i = 0; i < count; i++) to[i * Kind::kRows] = from[i * Kind::kRows];
        } else {
            using Value = typename Kind::Value;
            std::memcpy(static_cast<Value *>(experts.gathered.get()) + place * step.hidden_stride,
                        static_cast<const Value *>(step.normed) + row * step.hidden_stride,
                        static_cast<size_t>(step.hidden_stride) * sizeof(Value));
        }
    });
    step.model->team.barrier();
}

// Products of one of the matrices of all experts with their own rows. Calls done(place, first column, 32 sums).
template <class Kind, class Done>
void multiply_experts(StepState &step, const ExpertSet &set, Linear Expert::*which, const void *input, int64_t stride,
                      int64_t tickets, int64_t sent, Done done) {
    const ExpertStep &experts = step.experts;
    const auto *in = static_cast<const typename Kind::Input *>(input);
    alignas(64) float out[Kind::kRows * kColumns];
    auto multiply = [&](const ExpertRows &group, const Linear &matrix, int64_t ticket) {
        int64_t block = ticket % matrix.blocks;
        const float *bias = matrix.bias != nullptr ? matrix.bias + block * kColumns : nullptr;
        RowCut cut = RowCut::of<Kind>(group.rows, Kind::input_bytes(matrix.depth));
        int first = static_cast<int>(ticket / matrix.blocks) * cut.block, end = std::min(group.rows, first + cut.block);
        Kind::begin(group.rows);
        for (int row = first; row < end; row += cut.height) {
            int count = std::min(end - row, cut.height);
            int64_t place = group.begin + row;
            multiply_tile<Kind>(in + place * stride, stride, count, group.rows, matrix, block, out);
            for (int m = 0; m < count; m++) {
                float *sums = out + m * kColumns;
                if (bias != nullptr) {
                    for (int j = 0; j < kColumns; j += kLanes) store(sums + j, add(load(sums + j), load(bias + j)));
                }
                done(place + m, static_cast<int>(block) * kColumns, sums);
            }
        }
    };
    ThreadTeam &team = step.model->team;
    int64_t used = experts.used.load(std::memory_order_relaxed);
    int64_t longest = std::max<int64_t>(1, kRunRows * used / std::max<int64_t>(1, sent));
    auto all = team.even(tickets);
    for (auto run = team.take_run(all, longest); run.begin < run.end; run = team.take_run(all, longest)) {
        int64_t before = 0;  // tickets of the groups before
        for (size_t g = 0; before < run.end; g++) {
            const ExpertRows &group = experts.groups[g];
            const Linear &matrix = set.find(group.expert)->*which;
            int64_t own = int64_t{matrix.blocks} * RowCut::of<Kind>(group.rows, Kind::input_bytes(matrix.depth)).blocks;
            int64_t first = std::max(run.begin, before), last = std::min(run.end, before + own);
            for (int64_t ticket = first; ticket < last; ticket++) multiply(group, matrix, ticket - before);
            before += own;
        }
    }
    team.barrier();
}

// From gathered rows to outputs.
template <class Kind>
void run_expert_products(StepState &step, const ExpertSet &set, int rows) {
    using Value = typename Kind::Value;
    ExpertStep &experts = step.experts;
    const DiptychShape &shape = step.model->shape;
    auto *inner = static_cast<Value *>(experts.inner.get()) + set.inner_begin;
    int64_t width = set.experts.front().down.depth;  // the same for all
    auto *outputs = static_cast<float *>(experts.outputs.get());
    const void *input = kQuantises<Kind> ? experts.entries.get() : experts.gathered.get();
    int64_t stride = kQuantises<Kind> ? experts.entry_stride : step.hidden_stride;
    int64_t sent = int64_t{rows} * shape.experts.picked;
    int shift = halvings(shape);
    bool usual = is_silu_gated(shape);
    multiply_experts<Kind>(step, set, &Expert::gate_up, input, stride,
                           experts.gate_up_tickets.load(std::memory_order_relaxed), sent,
                           [&](int64_t place, int column, float *sums) {
                               activate(shape, usual, sums, inner + place * experts.inner_stride + (column >> shift));
                           });
    if constexpr (kQuantises<Kind>) {
        share(step, sent, kRowChunk, [&](int64_t n) {
            int64_t place = experts.places[static_cast<size_t>(n)];
            auto *entries = static_cast<typename Kind::Input *>(experts.entries.get());
            if (place >= 0) Kind::ready(inner + place * experts.inner_stride, entries, experts.entry_stride, place, width);
        });
        step.model->team.barrier();
    }
    input = kQuantises<Kind> ? experts.entries.get() : inner;
    stride = kQuantises<Kind> ? experts.entry_stride : experts.inner_stride;
    multiply_experts<Kind>(step, set, &Expert::down, input, stride,
                           experts.down_tickets.load(std::memory_order_relaxed), sent,
                           [&](int64_t place, int column, float *sums) {
                               std::memcpy(outputs + place * step.hidden_stride + column, sums, kColumns * sizeof(float));
                           });
}

}  // namespace
}  // namespace diptych
