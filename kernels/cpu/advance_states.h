// Division of a recurrence among ranks: slices of the states of every sequence.
#pragma once

#include "step_state.h"

namespace diptych {
namespace {

// Calls f(run, slice) for slices 0 .. slices - 1 of the states of each sequence that is not aborted: a phase, without its
// barrier. The runs of one sequence and slice come in order on one rank, other slices at the same time on others: no two
// slices may have numbers of the states in common. From `run.from` f reads its own numbers, and leaves all of them in
// `run.to`.
template <class F>
void advance_states(StepState &step, const Layer &layer, int64_t slices, F f) {
    const RecurrentStep &own = step.recurrent;
    ThreadTeam &team = step.model->team;
    int64_t place = layer.own.recurrent.place, sequences = step.batch.sequences;
    // Single tokens take little time each; a chunk is as long as its sequence.
    bool singles = static_cast<int64_t>(step.rows.size()) == sequences;
    auto tickets = team.even(sequences * slices);
    int64_t longest = singles ? 8 : 1;
    for (auto run = team.take_run(tickets, longest); run.begin < run.end; run = team.take_run(tickets, longest)) {
        for (int64_t i = run.begin; i < run.end; i++) {
            auto s = static_cast<size_t>(i / slices);
            if (!step.live[s]) continue;
            for (int32_t r = own.begins[s]; r < own.begins[s + 1]; r++) {
                const PageRun &rows = own.runs[static_cast<size_t>(r)];
                const auto *from = reinterpret_cast<const float *>(rows.before + place);
                auto *to = reinterpret_cast<float *>(rows.image + place);
                f(StateRun{rows.first, rows.rows, from, to}, i % slices);
            }
        }
    }
}

}  // namespace
}  // namespace diptych
