#include "step_state.h"

#include <algorithm>
#include <atomic>

#include "blocks.h"
#include "bytes.h"

namespace diptych {

namespace {

std::string at(int32_t sequence, const std::string &what) {
    return "sequence " + std::to_string(sequence) + ": " + what;
}

std::string refused_sequence(const DiptychModel &model, const DiptychBatch &batch, int32_t s,
                             const int32_t *tokens, const int32_t *table) {
    int64_t end = static_cast<int64_t>(batch.starts[s]) + batch.counts[s];
    if (batch.starts[s] < 0) return at(s, "starts before position 0");
    if (end > model.positions) {
        return at(s, std::to_string(end) + " tokens, rotary tables reach " + std::to_string(model.positions));
    }
    if (batch.memories[s] == 0) return at(s, "has no memory");
    int64_t blocks = (end + batch.block_size - 1) / batch.block_size;
    if (blocks > batch.table_lengths[s]) {
        return at(s, std::to_string(end) + " tokens do not fit into " + std::to_string(batch.table_lengths[s]) +
                         " blocks");
    }
    for (int64_t b = 0; b < blocks; b++) {
        if (table[b] < 0 || table[b] >= batch.memory_blocks[s]) {
            return at(s, "block " + std::to_string(table[b]) + " of " + std::to_string(batch.memory_blocks[s]));
        }
    }
    for (int32_t i = 0; i < batch.counts[s]; i++) {
        if (tokens[i] < 0 || tokens[i] >= model.shape.vocab) {
            return at(s, "token " + std::to_string(tokens[i]) + " outside the vocabulary of " +
                             std::to_string(model.shape.vocab));
        }
    }
    return "";
}

std::string incomplete(const DiptychModel &model) {
    if (model.embedding == nullptr || model.cosines == nullptr || model.sines == nullptr) {
        return "the model has no embedding or no rotary tables";
    }
    if (!model.head.data || model.final_norm.empty()) return "the model has no head or no final norm";
    for (const Layer &layer : model.layers) {
        bool whole = layer.qkv.data && layer.output.data && layer.gate_up.data && layer.down.data &&
                     !layer.input_norm.empty() && !layer.post_norm.empty();
        if (!whole) return "a layer of the model is incomplete";
    }
    return "";
}

template <class Entry>
void make_entries(StepState &step, int64_t rows, int64_t a_row) {
    // A kernel lays rows out in panels of its own height: the last one may be begun.
    step.entries = zeroed((rows + kRowPadding) * a_row * static_cast<int64_t>(sizeof(Entry)));
    step.entry_stride = a_row;
}

void grow_rows(StepState &step, const DiptychModel &model, int64_t rows) {
    if (rows <= step.row_capacity) return;
    int64_t capacity = round_up(rows, kRowPadding);
    int64_t element = model.bf16_activations() ? sizeof(bf16) : sizeof(float);
    step.row_capacity = 0;
    step.hidden_stride = round_up(model.shape.hidden, kDepth);
    step.qkv_stride = round_up(model.query_width() + 2 * model.kv_width(), kColumns);
    step.mixed_stride = round_up(model.query_width(), kDepth);
    step.inner_stride = round_up(model.shape.intermediate, kDepth);
    step.hidden = zeroed(capacity * step.hidden_stride * static_cast<int64_t>(sizeof(float)));
    step.qkv = zeroed(capacity * step.qkv_stride * static_cast<int64_t>(sizeof(float)));
    step.normed = zeroed(capacity * step.hidden_stride * element);
    step.mixed = zeroed(capacity * step.mixed_stride * element);
    step.inner = zeroed(capacity * step.inner_stride * element);
    int64_t widest = std::max({step.hidden_stride, step.mixed_stride, step.inner_stride});
    if (model.shape.dtype == DIPTYCH_BLOCKS) make_entries<Group>(step, capacity, widest / kGroup);
    if (model.shape.dtype == DIPTYCH_BYTES) make_entries<Segment>(step, capacity, SegmentCut::of(widest).count);
    step.row_capacity = capacity;
}

// Probabilities are kept for whole registers of up to 16 tokens a block; queries sit before them.
void grow_scores(StepState &step, const DiptychModel &model, int64_t blocks, int32_t threads) {
    int64_t tokens = blocks * round_up(step.batch.block_size, 16);
    int64_t floats = kPairs * (tokens + model.shape.head_dim);
    if (floats > step.score_floats) {
        step.scores.clear();
        step.score_floats = floats + floats / 2;  // contexts grow token by token, buffers should not
    }
    while (static_cast<int32_t>(step.scores.size()) < threads) {
        step.scores.push_back(zeroed(step.score_floats * static_cast<int64_t>(sizeof(float))));
    }
}

// Neighbouring rows of a sequence, to go through a part of a layer.
void add_rows(RowSet &set, const DiptychModel &model, int32_t first, int32_t count) {
    int32_t height = std::max(1, kPairs / model.group()), place = static_cast<int32_t>(set.size());
    for (int32_t row = 0; row < count; row += height) {
        set.tiles.push_back({place + row, std::min(height, count - row)});
    }
    for (int32_t row = 0; row < count; row++) set.rows.push_back(first + row);
}

// No tile reaches beyond its block, nor beyond a border within it at which another tile begins.
void add_places(StepState &step, int32_t first, int32_t start, int32_t count) {
    int32_t block_size = step.batch.block_size;
    for (int32_t row = 0, rows; row < count; row += rows) {
        int32_t within = (start + row) % block_size;
        rows = std::min({kPlaceRows - within % kPlaceRows, block_size - within, count - row});
        step.places.push_back({first + row, rows});
    }
}

void want(StepState &step, int32_t row) {
    bool greedy = step.batch.greedy != nullptr && step.batch.greedy[step.wanted.size()] != 0;
    int64_t greedy_rows = static_cast<int64_t>(step.peaks.size()) / step.model->head.blocks;
    if (greedy) {
        step.wanted.push_back({row, -1, static_cast<int64_t>(step.peaks.size())});
        step.peaks.resize(step.peaks.size() + static_cast<size_t>(step.model->head.blocks));
    } else {
        int64_t before = static_cast<int64_t>(step.wanted.size()) - greedy_rows;
        step.wanted.push_back({row, before * step.model->shape.vocab, -1});
    }
}

}  // namespace

std::string refusal(const DiptychModel &model, const DiptychBatch &batch, int32_t threads) {
    if (threads < 1 || threads > 1024) return "threads must be 1 .. 1024";
    if (batch.sequences < 1) return "an empty batch";
    if (batch.block_size < 1) return "block_size must be at least 1";
    std::string missing = incomplete(model);
    if (!missing.empty()) return missing;
    const int32_t *tokens = batch.tokens, *table = batch.tables;
    int64_t rows = 0;
    for (int32_t s = 0; s < batch.sequences; s++) {
        if (batch.counts[s] < 1) return at(s, "no tokens to compute");
        if (batch.logit_rows[s] < 0 || batch.logit_rows[s] > batch.counts[s]) {
            return at(s, std::to_string(batch.logit_rows[s]) + " rows of logits of " +
                             std::to_string(batch.counts[s]) + " tokens");
        }
        rows += batch.counts[s];
        if (rows > (1 << 24)) return "more tokens than a step can hold";
        std::string found = refused_sequence(model, batch, s, tokens, table);
        if (!found.empty()) return found;
        tokens += batch.counts[s];
        table += batch.table_lengths[s];
    }
    return "";
}

void prepare(StepState &step, DiptychModel &model, const DiptychBatch &batch, int32_t threads, float *logits) {
    step.model = &model;
    step.batch = batch;
    step.logits = logits;
    step.stopped = false;
    step.rows.clear();
    for (RowSet *set : {&step.all, &step.closing}) {
        set->rows.clear();
        set->tiles.clear();
    }
    step.places.clear();
    step.tables.clear();
    step.wanted.clear();
    step.peaks.clear();
    step.live.assign(static_cast<size_t>(batch.sequences), 1);
    const int32_t *tokens = batch.tokens, *table = batch.tables;
    int64_t blocks = 0;
    for (int32_t s = 0; s < batch.sequences; s++) {
        int32_t first = static_cast<int32_t>(step.rows.size()), count = batch.counts[s];
        for (int32_t i = 0; i < count; i++) step.rows.push_back({s, batch.starts[s] + i, tokens[i]});
        add_rows(step.all, model, first, count);
        add_rows(step.closing, model, first + count - batch.logit_rows[s], batch.logit_rows[s]);
        add_places(step, first, batch.starts[s], count);
        for (int32_t i = count - batch.logit_rows[s]; i < count; i++) want(step, first + i);
        step.tables.push_back(table);
        int64_t end = static_cast<int64_t>(batch.starts[s]) + count;
        blocks = std::max(blocks, (end + batch.block_size - 1) / batch.block_size);
        tokens += count;
        table += batch.table_lengths[s];
    }
    grow_rows(step, model, static_cast<int64_t>(step.rows.size()));
    grow_scores(step, model, blocks, threads);
}

void StepState::poll_aborts() {
    if (batch.abort_words == nullptr) return;
    bool any = false;
    for (int32_t s = 0; s < batch.sequences; s++) {
        // Another thread stores here at any time; an aligned 32-bit load cannot tear.
        if (__atomic_load_n(&batch.abort_words[s], __ATOMIC_RELAXED) != 0) live[s] = 0;
        any = any || live[s] != 0;
    }
    stopped = !any;
}

void StepState::tell_likeliest(int32_t *to) const {
    for (const WantedRow &wanted : wanted) {
        bool sampled = wanted.peaks >= 0 && is_live(wanted.row);
        *to++ = sampled ? likeliest(&peaks[static_cast<size_t>(wanted.peaks)], model->head.blocks) : -1;
    }
}

}  // namespace diptych
