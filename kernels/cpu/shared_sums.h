// How sublayers end where the ranks of a group compute a model: each of a rank's parts leaves its sums in the exchange, and
// the phase that reads the stream next adds those of all parts (residual.h). Embeddings come from the rank that has them.
#pragma once

#include "embedding.h"
#include "feed_forward.h"
#include "model_share.h"
#include "run_part_experts.h"
#include "width_norms.h"

namespace diptych {
namespace {

// The ranks of the group meet between two phases.
inline void meet(StepState &step, int rank) {
    ThreadTeam &team = step.model->team;
    team.barrier();
    if (rank == 0 && step.model->share->exchange.meet()) step.stopped = true;
    team.barrier();
}

// A part's last product of a sublayer, of `values` [rows of the set, stride]. What adapters add to it goes with it.
template <class Kind>
void leave_part(StepState &step, int rows, const Linear &matrix, const typename Kind::Value *values, int64_t stride,
                int32_t part, const Changes<Kind> &changes) {
    changes.shrink(values, stride);
    ready_rows<Kind>(step, rows, values, stride, matrix.depth);
    const RankExchange &exchange = step.model->share->exchange;
    float *base = exchange.slot(part, 0);
    auto place = [base, stride = exchange.slot(part, 1) - base](int row, int column) { return base + row * stride + column; };
    product<Kind>(
        step, matrix, values, stride, rows,
        [place, &changes](int row, int column, float *sums) {
            changes.expand(row, column, sums);
            std::memcpy(place(row, column), sums, kColumns * sizeof(float));
        },
        [place](int row, int column) { fetch_to_write(place(row, column), kColumns); });
}

template <class Kind>
struct SharedSums {
    using Value = typename Kind::Value;

    static void embed(StepState &step, int rank) {
        const DiptychModel &model = *step.model;
        const ModelShare &share = *model.share;
        auto bytes = static_cast<size_t>(model.shape.hidden) * sizeof(float);
        RowGroups groups(step, static_cast<int64_t>(step.rows.size()), Kind::kRows);
        if (const float *enters = step.batch.enters) {  // the same rows for every rank
            share_rows(step, groups, kRowChunk, [&](int64_t row) {
                if (is_own_row(step, row)) std::memcpy(step.hidden_row(row), enters + row * model.shape.hidden, bytes);
            });
            return;
        }
        share_rows(step, groups, kRowChunk, [&](int64_t row) {
            int32_t token = step.rows[static_cast<size_t>(row)].token - share.first_token;
            if (token < 0 || token >= model.shape.vocab) return;
            embed_token(model, token, share.exchange.slot(0, row));
        });
        meet(step, rank);
        share_rows(step, groups, kRowChunk, [&](int64_t row) {
            const float *given = given_row(step, row);
            const float *from = given == nullptr ? share.exchange.filled(0, row) : given;
            if (is_own_row(step, row)) std::memcpy(step.hidden_row(row), from, bytes);
        });
    }

    // What is asked here is answered within the layer: of a step that has stopped nothing is left for the next one.
    static void poll(StepState &step) {
        if (!step.stopped && step.poll_aborts()) step.model->share->exchange.ask_to_stop();
    }

    // After normed rows: all of them are there for the products that follow.
    static void end_norms(StepState &step, int rank) { step.divided ? meet(step, rank) : step.model->team.barrier(); }

    // Between the product that makes queries and keys, and their rotation.
    static void norm_heads(StepState &step, const Layer &layer, int rank) {
        const ModelShare &share = *step.model->share;
        if (share.query_lanes == 0) return;
        RowGroups groups(step, static_cast<int64_t>(step.rows.size()), Kind::kRows);
        share_rows(step, groups, kRowChunk, [&](int64_t row) {
            for (int32_t own = 0; own < share.own_parts; own++) leave_squares(step, own, row);
        });
        meet(step, rank);
        share_rows(step, groups, kRowChunk, [&](int64_t row) { norm_widths(step, layer, row); });
        step.model->team.barrier();
    }

    static Update add_attention(StepState &step, const RowSet &set, const Layer &layer, int index, int rank) {
        const ModelShare &share = *step.model->share;
        for_parts(step, index, [&](int32_t own, const PartProducts &part) {
            leave_part<Kind>(step, static_cast<int>(set.size()), part.output, slice(step.mixed, share.mixed_begins, own),
                             step.mixed_stride, share.part(own),
                             Changes<Kind>(step, set, index, DIPTYCH_OUTPUT, own));
        });
        return sums_of_all(step, layer.attention_output_norm, rank);
    }

    static Update run_feed_forward(StepState &step, const RowSet &set, const Layer &layer, int index,
                                   const Update &update, int rank) {
        const ModelShare &share = *step.model->share;
        int rows = static_cast<int>(set.size());
        bool experts = layer.own.experts != 0;
        norm_rows<Kind>(step, set, layer.post_norm, update, experts ? step.experts.normed : nullptr);
        end_norms(step, rank);
        if (experts) {
            run_part_experts<Kind>(step, set, layer, index);
            return sums_of_all(step, layer.feed_forward_output_norm, rank);
        }
        for_parts(step, index, [&](int32_t own, const PartProducts &part) {
            run_gate_up<Kind>(step, rows, part.gate_up, slice(step.inner, share.inner_begins, own), step.inner_stride,
                              Changes<Kind>(step, set, index, DIPTYCH_GATE_UP, own));
        });
        for_parts(step, index, [&](int32_t own, const PartProducts &part) {
            leave_part<Kind>(step, rows, part.down, slice(step.inner, share.inner_begins, own), step.inner_stride,
                             share.part(own), Changes<Kind>(step, set, index, DIPTYCH_DOWN, own));
        });
        return sums_of_all(step, layer.feed_forward_output_norm, rank);
    }

    // The logits of all ranks are there then, and no rank writes to a block any more.
    static void end(StepState &step, int rank) {
        step.model->team.barrier();
        if (rank != 0) return;
        leave_peaks(step);
        step.model->share->exchange.meet();
    }

  private:
    static Value *slice(const Buffer &rows, const std::vector<int64_t> &begins, int32_t own) {
        return static_cast<Value *>(rows.get()) + begins[static_cast<size_t>(own)];
    }

    static Update sums_of_all(StepState &step, const std::vector<float> &norm, int rank) {
        meet(step, rank);
        Update update;
        update.parts = true;
        update.norm = norm.empty() ? nullptr : &norm;
        return update;
    }
};

}  // namespace
}  // namespace diptych
