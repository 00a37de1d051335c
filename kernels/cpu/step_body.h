// The step: what every rank runs, phase after phase, with a barrier between them.
//
//   embed | norm | qkv | place (norm and rotate heads, write keys and values) | attend | output + residual
//         | norm | gate and up, activation | down + residual | ... | final norm of the wanted rows | head
//
// Recurrent layers have other phases in place of attention, or beside it (recurrent.h), and the step one more before the
// first layer and two behind the head (recurrent_step.h).
//
// Experts take the place of gate, up and down (experts.h). Rows with adapters have a phase more before each product
// (adapters.h).
//
// Where a rank of a group computes its share, what sublayers add goes through the exchange of ranks (shared_sums.h).
//
// In the last layer the wanted rows alone go on after `place`: of a long prompt that is one.
//
// Within a phase ranks take rows, blocks of columns or attention tasks by tickets, their own ones first (row_groups.h).
#pragma once

#include "attention_gate.h"
#include "attention_tasks.h"
#include "embedding.h"
#include "feed_forward.h"
#include "recurrent.h"
#include "shared_sums.h"
#include "state_pages.h"
#include "write_kv.h"

namespace diptych {
namespace {

// Attention tasks of one row that a rank takes at once, at most.
constexpr int kRunTasks = 12;

// How sublayers begin and end where one process computes the model.
template <class Kind>
struct WholeSums {
    static void embed(StepState &step, int) {
        auto bytes = static_cast<size_t>(step.model->shape.hidden) * sizeof(float);
        RowGroups groups(step, static_cast<int64_t>(step.rows.size()), Kind::kRows);
        share_rows(step, groups, kRowChunk, [&](int64_t row) {
            const float *given = given_row(step, row);
            if (given != nullptr) std::memcpy(step.hidden_row(row), given, bytes);
            else embed_token(*step.model, step.rows[static_cast<size_t>(row)].token, step.hidden_row(row));
        });
    }

    static void poll(StepState &step) { step.stopped = step.poll_aborts(); }

    static void end_norms(StepState &step, int) { step.model->team.barrier(); }

    static void norm_heads(StepState &, const Layer &, int) {}

    static Update add_attention(StepState &step, const RowSet &set, const Layer &layer, int index, int) {
        Changes<Kind> output(step, set, index, DIPTYCH_OUTPUT);
        bool apart = !layer.attention_output_norm.empty();
        add_to_stream<Kind>(step, set, layer.output, step.mixed, step.mixed_stride, apart, output);
        step.model->team.barrier();
        return {apart, false, false, apart ? &layer.attention_output_norm : nullptr};
    }

    static Update run_feed_forward(StepState &step, const RowSet &set, const Layer &layer, int index,
                                   const Update &update, int) {
        return diptych::run_feed_forward<Kind>(step, set, layer, index, update);
    }

    static void end(StepState &, int) {}
};

// Calls f(a number of the type in which this step's keys and values are kept).
template <class Kind, class F>
void with_kept(const StepState &step, F f) {
    if (step.batch.kept == DIPTYCH_KV_INT8) return f(int8_t{});
    f(typename Kind::Stored{});
}

// Writes the keys and values of all rows.
template <class Kept, class Kind>
void write_kv(StepState &step, const Layer &layer, int index) {
    ThreadTeam &team = step.model->team;
    RowGroups groups(step, static_cast<int64_t>(step.rows.size()), Kind::kRows);
    auto first = [&](int64_t row) { return first_tile(step.places, row); };
    auto tickets = groups.tickets([&](int64_t begin, int64_t end) { return first(end) - first(begin); });
    for (auto run = team.take_run(tickets, 1); run.begin < run.end; run = team.take_run(tickets, 1)) {
        RowTile tile = step.places[static_cast<size_t>(run.begin)];
        if (step.is_live(tile.first)) write_kv_rows<Kept>(step, layer, index, tile);
    }
    team.barrier();
}

template <class Kept, class Kind>
void run_attention(StepState &step, const RowSet &set, const Layer &layer, int index, int rank) {
    ThreadTeam &team = step.model->team;
    int kv_heads = step.model->shape.kv_heads;
    auto *scratch = static_cast<float *>(step.scores[static_cast<size_t>(rank)].get());
    auto task = [&](int64_t i) {
        RowTile tile = set.tiles[static_cast<size_t>(i / kv_heads)];
        return AttentionTask{&layer, index, static_cast<int>(i % kv_heads), &set, tile};
    };
    // Rows of their own read from memory, and each fetches for the one after it. Other tasks take longer.
    RowGroups groups(step, set.size(), Kind::kRows);
    auto first = [&](int64_t row) { return first_tile(set.tiles, row) * kv_heads; };
    auto count = [&](int64_t begin, int64_t end) { return first(end) - first(begin); };
    auto tickets = groups.count > 1 ? groups.tickets(count) : team.even(count(0, set.size()));
    int64_t longest = set.tiles.size() == set.rows.size() ? kRunTasks : 1;
    for (auto run = team.take_run(tickets, longest); run.begin < run.end; run = team.take_run(tickets, longest)) {
        for (int64_t i = run.begin; i < run.end; i++) {
            BlockRange<Kept> next;
            if (i + 1 < run.end) next = task(i + 1).template range<Kept>(step);
            if (step.is_live(task(i).row(0))) attend_task<Kind>(step, task(i), next, scratch);
        }
    }
    team.barrier();
}

// Scales and caps 32 logits.
[[gnu::noinline]] inline void finish_logits(const DiptychShape &shape, float *logits) {
    for (int j = 0; j < kColumns; j += kLanes) {
        Lanes scaled = mul(load(logits + j), splat(shape.logit_scale));
        store(logits + j, shape.logit_cap > 0.0f ? soft_cap(scaled, shape.logit_cap) : scaled);
    }
}

// A wanted row behind the final norm.
template <class Kind>
void keep_hidden_row(const StepState &step, int64_t place) {
    int64_t hidden = step.model->shape.hidden;
    const auto *from = static_cast<const typename Kind::Value *>(step.normed) + place * step.hidden_stride;
    float *to = step.batch.hidden + place * hidden;
    for (int64_t j = 0; j < hidden; j++) to[j] = to_float(from[j]);
}

template <class Kind, class Sums>
void run_head(StepState &step, const Update &update, int rank) {
    DiptychModel &model = *step.model;
    auto *normed = static_cast<typename Kind::Value *>(step.normed);
    int64_t vocab = model.shape.vocab;  // of a rank: its own tokens
    int wanted = static_cast<int>(step.wanted.size());
    PlaceRange own = own_places(step, step.closing);  // the last layer's places are those of the wanted rows
    share_rows(step, RowGroups(step, own.count(), Kind::kRows), 1, [&](int64_t number) {
        int64_t i = own.begin + number;
        float *row = step.hidden_row(step.wanted[static_cast<size_t>(i)].row);
        add_update(step, update, i, row);
        add_image_row(step, update.behind, step.wanted[static_cast<size_t>(i)].row, row);
        norm_row(model.shape, row, model.final_norm, normed + i * step.hidden_stride);
        if (step.batch.hidden != nullptr && !step.divided) keep_hidden_row<Kind>(step, i);
        ready_normed_row<Kind>(step, i);
    });
    Sums::end_norms(step, rank);
    if (step.batch.hidden != nullptr && step.divided && rank == 0) {  // rows of all ranks are there from now on
        for (int64_t i = 0; i < wanted; i++) keep_hidden_row<Kind>(step, i);
    }
    if (wanted == 0) return;
    bool changed = model.shape.logit_scale != 1.0f || model.shape.logit_cap > 0.0f;
    auto keep = [&](int i, int column, float *sums) {
        const WantedRow &to = step.wanted[static_cast<size_t>(i)];
        int64_t count = vocab - column < kColumns ? vocab - column : kColumns;
        if (changed) finish_logits(model.shape, sums);
        if (to.peaks >= 0) {
            step.peaks[static_cast<size_t>(to.peaks + column / kColumns)] =
                peak_of_block(sums, static_cast<int>(count));
            return;
        }
        bool live = step.is_live(to.row);
        float *logits = step.logits + to.logits + column;
        for (int64_t j = 0; j < count; j++) logits[j] = live ? sums[j] : std::numeric_limits<float>::quiet_NaN();
    };
    product_of_normed<Kind>(step, model.head, wanted, keep, [](int, int) {});
}

// The residual stream behind the last layer, where other layers follow in another process.
template <class Kind>
void leave_rows(StepState &step, const Update &update) {
    int64_t hidden = step.model->shape.hidden;
    share_rows(step, RowGroups(step, step.all.size(), Kind::kRows), kRowChunk, [&](int64_t row) {
        add_update(step, update, row, step.hidden_row(row));
        add_image_row(step, update.behind, row, step.hidden_row(row));
        std::memcpy(step.batch.leaves + row * hidden, step.hidden_row(row), static_cast<size_t>(hidden) * sizeof(float));
    });
}

// Copies the residual stream before a layer, if it is tapped.
inline void keep_features(const StepState &step, int layer) {
    const DiptychBatch &batch = step.batch;
    if (batch.features == nullptr) return;
    int64_t hidden = step.model->shape.hidden, row = batch.taps * hidden;
    for (int32_t tap = 0; tap < batch.taps; tap++) {
        if (batch.tapped[tap] != layer) continue;
        for (int64_t i = 0; i < step.all.size(); i++) {
            std::memcpy(batch.features + i * row + tap * hidden, step.hidden_row(i),
                        static_cast<size_t>(hidden) * sizeof(float));
        }
    }
}

// Queries, keys and values of normed rows.
template <class Kind>
void project_heads(StepState &step, const Layer &layer, int index) {
    auto place = [&](int row, int column) { return step.qkv_row(row) + column; };
    Changes<Kind> qkv(step, step.all, index, DIPTYCH_QKV);
    qkv.shrink(step.normed, step.hidden_stride);
    product_of_normed<Kind>(
        step, layer.qkv, static_cast<int>(step.rows.size()),
        [&](int row, int column, float *sums) {
            qkv.expand(row, column, sums);
            std::memcpy(place(row, column), sums, kColumns * sizeof(float));
        },
        [&](int row, int column) { fetch_to_write(place(row, column), kColumns); });
    step.model->team.barrier();
}

// Attention, a recurrence, both or neither, of normed rows. Both read these before one of them makes its output ready for a
// product, where the normed rows may lie.
template <class Kind, class Sums>
Update run_mixers(StepState &step, const RowSet &set, const Layer &layer, int index, int rank) {
    Update update;
    bool attends = layer.own.attention != 0, recurs = layer.is_recurrent();
    if (recurs) project_recurrence<Kind>(step, layer);
    if (attends) project_heads<Kind>(step, layer, index);
    if (recurs) run_recurrence<Kind>(step, layer);
    if (attends) {
        Sums::norm_heads(step, layer, rank);
        with_kept<Kind>(step, [&](auto kept) {
            write_kv<decltype(kept), Kind>(step, layer, index);
            run_attention<decltype(kept), Kind>(step, set, layer, index, rank);
        });
        gate_attention<Kind>(step, set);
        update = Sums::add_attention(step, set, layer, index, rank);
    }
    return recurs ? add_recurrence<Kind>(step, set, layer, update) : update;
}

// `Sums`: WholeSums or SharedSums.
template <class Kind, class Sums>
void run_layers(StepState &step, int rank) {
    ThreadTeam &team = step.model->team;
    Sums::embed(step, rank);
    team.barrier();
    bool keeps_states = step.recurrent.page > 0;
    if (keeps_states) read_states(step);
    int layers = step.model->shape.layers;
    Update update;
    for (int index = 0; index < layers; index++) {
        const Layer &layer = step.model->layers[static_cast<size_t>(index)];
        const RowSet &set = index + 1 < layers || step.batch.leaves != nullptr ? step.all : step.closing;
        if (rank == 0 && index == step.guests_from) team.welcome();
        // All other ranks read what is set here only after the next barrier, and before the last of the layer.
        if (rank == 0) Sums::poll(step);
        norm_rows<Kind>(step, step.all, layer.input_norm, update, layer.recurrent.side.data ? step.experts.normed : nullptr);
        Sums::end_norms(step, rank);
        if (step.stopped) return;
        if (rank == 0) keep_features(step, index);  // nothing is added to them before the next barrier
        update = run_mixers<Kind, Sums>(step, set, layer, index, rank);
        if (layer.own.feed_forward) update = Sums::run_feed_forward(step, set, layer, index, update, rank);
        update.behind = index;
    }
    step.batch.leaves == nullptr ? run_head<Kind, Sums>(step, update, rank) : leave_rows<Kind>(step, update);
    Sums::end(step, rank);
    if (!keeps_states) return;
    team.barrier();
    write_states(step);
}

template <class Kind>
void run_step(void *state, int rank) {
    StepState &step = *static_cast<StepState *>(state);
    step.model->share ? run_layers<Kind, SharedSums<Kind>>(step, rank) : run_layers<Kind, WholeSums<Kind>>(step, rank);
    Kind::end();
}

}  // namespace
}  // namespace diptych
