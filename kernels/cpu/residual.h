// The residual stream: what sublayers read of it, and how they add to it.
//
// A column block of a product is added as it comes. Where a norm follows the sublayer, or experts give a row's numbers
// in several places, whole rows are needed first: these stay beside the stream as an update, and the phase that reads
// the stream next, to norm it, adds them. No further phase is needed.
#pragma once

#include "divided_rows.h"
#include "model_share.h"
#include "products.h"
#include "vector_math.h"

namespace diptych {
namespace {

// What a sublayer left beside the stream, by the places of its rows.
struct Update {
    bool rows = false;     // in StepState::update
    bool experts = false;  // in the places of experts, too
    bool parts = false;    // in the slots of all ranks' exchange
    const std::vector<float> *norm = nullptr;  // of the sum, or none
    int behind = -1;  // the layer that it ends, behind which rows of images may be added, too
};

// Adds what a row of an image brings behind a layer (Qwen3-VL: "DeepStack", Meng et al. 2024).
inline void add_image_row(const StepState &step, int layer, int64_t row, float *hidden) {
    const DiptychBatch &batch = step.batch;
    if (layer < 0 || layer >= batch.image_layers || batch.image_places[row] < 0) return;
    int64_t width = step.model->shape.hidden;
    const float *from = batch.images + batch.image_places[row] * batch.image_stride + layer * width;
    for (int64_t i = 0; i < width; i++) hidden[i] += from[i];
}

// What the stream begins with for a token that has a row of an image; null: with its embedding.
inline const float *given_row(const StepState &step, int64_t row) {
    const DiptychBatch &batch = step.batch;
    if (batch.embeddings == nullptr || batch.image_places[row] < 0) return nullptr;
    return batch.embeddings + batch.image_places[row] * batch.image_stride;
}

// The outputs of a row's experts that are here, in ascending order, and then what is in `to` already, where it has the
// shared expert's output.
inline void add_experts(const StepState &step, int64_t place, bool has_update, float *to) {
    const DiptychExperts &shape = step.model->shape.experts;
    const ExpertStep &experts = step.experts;
    int64_t first = place * shape.picked;
    float gate = has_update ? experts.shared_gate(place, shape.count) : 0.0f;
    for (int i = 0; i < step.hidden_stride; i += kLanes) {
        Lanes sum = splat(0.0f);
        for (int64_t n = first; n < first + shape.picked; n++) {
            int64_t own = experts.places[static_cast<size_t>(n)];
            if (own < 0) continue;
            const auto *output = static_cast<const float *>(experts.outputs.get()) + own * step.hidden_stride;
            sum = add(sum, mul(splat(experts.weights[static_cast<size_t>(n)]), load(output + i)));
        }
        if (has_update) sum = add(sum, mul(splat(gate), load(to + i)));
        store(to + i, sum);
    }
}

// What all parts of the model gave for a row, in their order.
inline void add_parts(const StepState &step, int64_t place, float *to) {
    const ModelShare &share = *step.model->share;
    for (int i = 0; i < step.hidden_stride; i += kLanes) {
        Lanes sum = load(share.exchange.filled(0, place) + i);
        for (int part = 1; part < share.parts(); part++) sum = add(sum, load(share.exchange.filled(part, place) + i));
        store(to + i, sum);
    }
}

// Adds what the sublayer before left for the row at `place`.
inline void add_update(const StepState &step, const Update &update, int64_t place, float *hidden) {
    if (!update.rows && !update.experts && !update.parts) return;
    const DiptychShape &shape = step.model->shape;
    float *sums = step.update_row(place);
    if (update.experts) add_experts(step, place, update.rows, sums);
    if (update.parts) add_parts(step, place, sums);
    if (update.norm != nullptr) rms_norm(sums, update.norm->data(), shape.hidden, shape.rms_epsilon, sums);
    Lanes scale = splat(shape.residual_scale);
    for (int i = 0; i < step.hidden_stride; i += kLanes) {
        store(hidden + i, add(load(hidden + i), mul(load(sums + i), scale)));
    }
}

// Norms one row, or copies it where there is no norm.
template <class Out>
inline void norm_row(const DiptychShape &shape, const float *row, const std::vector<float> &weight, Out *to) {
    if (!weight.empty()) return rms_norm(row, weight.data(), shape.hidden, shape.rms_epsilon, to);
    by_lanes(
        shape.hidden, [&](int i) { store(to + i, load(row + i)); },
        [&](int i, int rest) { store_part(to + i, load_part(row + i, rest), rest); });
}

// Makes the stream's rows, or this rank's of them, the input of a sublayer. `wide`: fp32 [rows, hidden_stride] for them,
// too, or null.
template <class Kind>
void norm_rows(StepState &step, const RowSet &set, const std::vector<float> &weight, const Update &update,
               float *wide = nullptr) {
    const DiptychShape &shape = step.model->shape;
    auto *normed = static_cast<typename Kind::Value *>(step.normed);
    PlaceRange own = own_places(step, set);
    share_rows(step, RowGroups(step, own.count(), Kind::kRows), kRowChunk, [&](int64_t number) {
        int64_t place = own.begin + number;
        auto *to = normed + place * step.hidden_stride;
        float *row = step.hidden_row(set.row(place));
        add_update(step, update, place, row);
        add_image_row(step, update.behind, set.row(place), row);
        norm_row(shape, row, weight, to);
        if (wide != nullptr) norm_row(shape, row, weight, wide + place * step.hidden_stride);
        ready_normed_row<Kind>(step, place);
    });
}

// A sublayer's last product, of `values` [rows of the set, width]: added to the stream or, `apart`, kept as an update, or
// added to the one that there is. Rows with adapters have `changes`.
template <class Kind>
void add_to_stream(StepState &step, const RowSet &set, const Linear &matrix, const Buffer &values, int64_t width,
                   bool apart, const Changes<Kind> &changes, bool to_update = false) {
    changes.shrink(values.get(), width);
    ready_rows<Kind>(step, set.size(), values.get(), width, width);
    // By value: what is reached through `step` would be read anew for every row of a block.
    float *base = apart ? step.update_row(0) : step.hidden_row(0);
    const int32_t *rows = apart ? nullptr : set.rows.data();
    auto place = [base, rows, stride = step.hidden_stride](int row, int column) {
        return base + (rows != nullptr ? rows[row] : row) * stride + column;
    };
    Lanes scale = splat(apart ? 1.0f : step.model->shape.residual_scale);
    auto add_sums = [place, kept = apart && !to_update, &changes, scale](int row, int column, float *sums) {
        changes.expand(row, column, sums);
        float *to = place(row, column);
        if (kept) {
            std::memcpy(to, sums, kColumns * sizeof(float));
            return;
        }
        for (int j = 0; j < kColumns; j += kLanes) store(to + j, add(load(to + j), mul(load(sums + j), scale)));
    };
    product<Kind>(step, matrix, values.get(), width, static_cast<int>(set.size()), add_sums,
                  [place](int row, int column) { fetch_to_write(place(row, column), kColumns); });
}

}  // namespace
}  // namespace diptych
