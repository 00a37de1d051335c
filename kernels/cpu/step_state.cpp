#include "step_state.h"

#include <algorithm>
#include <atomic>

#include "blocks.h"
#include "bytes.h"
#include "divided_rows.h"
#include "model_parts.h"
#include "model_share.h"
#include "recurrent_kinds.h"
#include "state_pages.h"
#include "token_tree.h"
#include "window_tables.h"

namespace diptych {

namespace {

std::string at(int32_t sequence, const std::string &what) {
    return "sequence " + std::to_string(sequence) + ": " + what;
}

std::string refused_sequence(const DiptychModel &model, const DiptychBatch &batch, int32_t s,
                             const int32_t *tokens, const int32_t *table) {
    int64_t end = static_cast<int64_t>(batch.starts[s]) + batch.counts[s];
    if (batch.starts[s] < 0) return at(s, "starts before position 0");
    if (batch.turns == nullptr && end > model.positions) {
        return at(s, std::to_string(end) + " tokens, rotary tables reach " + std::to_string(model.positions));
    }
    if (batch.memories[s] == 0) return at(s, "has no memory");
    if (batch.kept == DIPTYCH_KV_INT8 && (batch.memories[s] | static_cast<uint64_t>(batch.block_stride)) % 4 != 0) {
        return at(s, "its scales do not lie at multiples of 4");
    }
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
    int32_t vocab = model.share ? model.share->vocab : model.shape.vocab;
    for (int32_t i = 0; i < batch.counts[s]; i++) {
        if (tokens[i] < 0 || tokens[i] >= vocab) {
            return at(s, "token " + std::to_string(tokens[i]) + " outside the vocabulary of " + std::to_string(vocab));
        }
    }
    return "";
}

// Turns must be rows of the tables; what a token sees ends behind it, and where its chunk ends at the latest.
std::string refused_places(const DiptychModel &model, const DiptychBatch &batch) {
    const int32_t *turns = batch.turns, *ends = batch.ends;
    for (int32_t s = 0; s < batch.sequences; s++) {
        int32_t start = batch.starts[s], count = batch.counts[s];
        for (int32_t i = 0; i < count; i++) {
            if (turns != nullptr && (turns[i] < 0 || turns[i] >= model.positions)) {
                return at(s, "turn " + std::to_string(turns[i]) + " of " + std::to_string(model.positions));
            }
            if (ends != nullptr && (ends[i] <= start + i || ends[i] > start + count)) {
                return at(s, "a token sees up to " + std::to_string(ends[i]));
            }
        }
        if (turns != nullptr) turns += count;
        if (ends != nullptr) ends += count;
    }
    return "";
}

// Rows of images must be there for each token that has one.
std::string refused_images(const DiptychModel &model, const DiptychBatch &batch, int64_t tokens) {
    if (batch.image_layers == 0 && batch.embeddings == nullptr) return "";
    if (batch.image_layers < 0 || batch.image_layers > model.shape.layers) {
        return "rows of images behind " + std::to_string(batch.image_layers) + " layers";
    }
    if ((batch.images == nullptr && batch.image_layers > 0) || batch.image_places == nullptr ||
        batch.image_stride < static_cast<int64_t>(std::max(batch.image_layers, 1)) * model.shape.hidden) {
        return "rows of images are missing";
    }
    for (int64_t i = 0; i < tokens; i++) {
        if (batch.image_places[i] < -1 || batch.image_places[i] >= batch.image_rows) {
            return "row " + std::to_string(batch.image_places[i]) + " of " + std::to_string(batch.image_rows) +
                   " rows of images";
        }
    }
    return "";
}

// Quantised inputs of a product that a row of `width` numbers has; 0 where they are not quantised.
int64_t entries_of_row(const DiptychModel &model, int64_t width) {
    if (model.shape.dtype == DIPTYCH_BLOCKS) return width / kGroup;
    return model.shape.dtype == DIPTYCH_BYTES ? SegmentCut::of(width).count : 0;
}

// Room for those of `rows` rows of up to `width` numbers. None where they are not quantised.
struct Entries {
    Buffer memory;
    int64_t stride;
};

Entries make_entries(const DiptychModel &model, int64_t rows, int64_t width) {
    int64_t a_row = entries_of_row(model, width);
    int64_t bytes = model.shape.dtype == DIPTYCH_BLOCKS ? sizeof(Group) : sizeof(Segment);
    if (a_row == 0) return {Buffer(), 0};
    // A kernel lays rows out in panels of its own height: the last one may be begun.
    return {zeroed((rows + kRowPadding) * a_row * bytes), a_row};
}

int64_t value_bytes(const DiptychModel &model) { return model.bf16_activations() ? sizeof(bf16) : sizeof(float); }

// Places of rows sent to experts: those of an expert begin where a kernel's panel of rows does.
int64_t expert_places(const DiptychExperts &experts, int64_t rows) {
    int64_t sent = rows * experts.picked;
    return round_up(sent + std::min<int64_t>(experts.count, sent) * (kRowPadding - 1), kRowPadding) + kRowPadding;
}

void grow_experts(StepState &step, const DiptychModel &model, int64_t rows) {
    const DiptychExperts &experts = model.shape.experts;
    ExpertStep &own = step.experts;
    int64_t number = sizeof(float), value = value_bytes(model), places = expert_places(experts, rows);
    own.router_stride = round_up(experts.count + 1, kColumns);
    own.inner_stride = model.share ? model.share->expert_width : round_up(experts.intermediate, kDepth);
    own.shared_stride = model.share ? model.share->shared_width : round_up(experts.shared_intermediate, kDepth);
    own.logits = zeroed(rows * own.router_stride * number);
    own.gathered = zeroed(places * step.hidden_stride * value);
    own.inner = zeroed(places * own.inner_stride * value);
    own.outputs = zeroed(places * step.hidden_stride * number);
    own.shared_inner = zeroed(rows * own.shared_stride * value);
    Entries entries = make_entries(model, places, std::max(step.hidden_stride, own.inner_stride));
    own.entries = std::move(entries.memory);
    own.entry_stride = entries.stride;
    auto sent = static_cast<size_t>(rows * experts.picked);
    own.picked.resize(sent);
    own.weights.resize(sent);
    own.places.resize(sent);
    own.groups.resize(static_cast<size_t>(experts.count));
    own.group_of.resize(static_cast<size_t>(experts.count));
}

// The widest of what recurrent layers have; returns how wide the inputs of their products are.
int64_t grow_recurrent(StepState &step, const DiptychModel &model, int64_t rows) {
    RecurrentStep &own = step.recurrent;
    int64_t read = 0, width = 0;
    own.in_stride = own.out_stride = own.scratch_stride = 0;
    own.padded = false;
    for (const Layer &layer : model.layers) {
        if (!layer.is_recurrent()) continue;
        RecurrentSizes sizes = recurrent_sizes(layer.own.recurrent);
        int64_t in = round_up(sizes.in_width(), kColumns) + round_up(sizes.side_width(), kColumns);
        own.padded = own.padded || (width > 0 && sizes.width != width);
        width = sizes.width;
        own.in_stride = std::max(own.in_stride, in);
        own.out_stride = std::max(own.out_stride, round_up(sizes.width, kDepth));
        own.scratch_stride = std::max(own.scratch_stride, round_up(sizes.scratch, kDepth));
        read = std::max<int64_t>({read, sizes.inner_columns, sizes.steps_columns});
    }
    int64_t number = sizeof(float);
    if (own.in_stride > 0) own.in = zeroed(rows * own.in_stride * number);
    if (own.out_stride > 0) own.out = zeroed(rows * own.out_stride * value_bytes(model));
    if (own.scratch_stride > 0) own.scratch = zeroed(rows * own.scratch_stride * number);
    return std::max(own.out_stride, round_up(read, kDepth));
}

// Whether some layer says so.
template <class Says>
bool some_layer(const DiptychModel &model, Says says) {
    return std::any_of(model.layers.begin(), model.layers.end(), says);
}

void grow_rows(StepState &step, const DiptychModel &model, int64_t rows) {
    if (rows <= step.row_capacity) return;
    const DiptychShape &shape = model.shape;
    int64_t capacity = round_up(rows, kRowPadding), number = sizeof(float), value = value_bytes(model);
    step.row_capacity = 0;
    step.hidden_stride = round_up(shape.hidden, kDepth);
    step.qkv_stride = round_up(model.qkv_width(), kColumns);
    step.mixed_stride = model.share ? model.share->mixed_begins.back() : round_up(model.query_width(), kDepth);
    step.inner_stride = model.share ? model.share->inner_begins.back() : round_up(shape.intermediate, kDepth);
    step.hidden = zeroed(capacity * step.hidden_stride * number);
    step.qkv = zeroed(capacity * step.qkv_stride * number);
    step.own_normed = zeroed(capacity * step.hidden_stride * value);
    step.mixed = zeroed(capacity * step.mixed_stride * value);
    step.inner = zeroed(capacity * step.inner_stride * value);
    bool after = some_layer(model, [](const Layer &layer) { return layer.own.norms_after != 0; });
    if (after || model.has_experts() || model.share) step.update = zeroed(capacity * step.hidden_stride * number);
    int64_t shared = round_up(shape.experts.shared_intermediate, kDepth);
    bool wide = model.has_experts() || some_layer(model, [](const Layer &layer) { return layer.recurrent.side.data != nullptr; });
    if (wide && model.bf16_activations()) step.experts.own_normed = zeroed(capacity * step.hidden_stride * number);
    int64_t recurrent = grow_recurrent(step, model, capacity);
    Entries entries = make_entries(
        model, capacity, std::max({step.hidden_stride, step.mixed_stride, step.inner_stride, shared, recurrent}));
    step.entries = std::move(entries.memory);
    step.entry_stride = entries.stride;
    step.normed_entry_stride = entries_of_row(model, step.hidden_stride);
    if (model.has_experts()) grow_experts(step, model, capacity);
    step.row_capacity = capacity;
}

// Probabilities are kept for whole registers of up to 16 tokens a block; queries sit before them.
void grow_scores(StepState &step, const DiptychModel &model, int64_t blocks, int32_t threads) {
    int64_t tokens = blocks * round_up(step.batch.block_size, 16);
    int64_t floats = kPairs * (tokens + model.shape.head_dim) + step.tree_floats;
    if (floats > step.score_floats) {
        step.scores.clear();
        step.score_floats = floats + floats / 2;  // contexts grow token by token, buffers should not
    }
    while (static_cast<int32_t>(step.scores.size()) < threads) {
        step.scores.push_back(zeroed(step.score_floats * static_cast<int64_t>(sizeof(float))));
    }
}

// Neighbouring rows of a sequence, to go through a part of a layer.
void add_rows(RowSet &set, const DiptychModel &model, int32_t first, int32_t count, bool tree) {
    int32_t widest = 1;
    for (int32_t head = 0; head < model.shape.kv_heads; head++) widest = std::max(widest, model.group(head));
    int32_t height = tree ? 1 : std::max(1, kPairs / widest), place = static_cast<int32_t>(set.size());
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
        step.wanted.push_back({row, before * step.logit_stride, -1});
    }
}

}  // namespace

std::string refusal(const DiptychModel &model, const DiptychBatch &batch, int32_t threads) {
    if (threads < 1 || threads > 1024) return "threads must be 1 .. 1024";
    if (batch.sequences < 1) return "an empty batch";
    if (batch.block_size < 1) return "block_size must be at least 1";
    if (batch.kept != DIPTYCH_KV_OWN && batch.kept != DIPTYCH_KV_INT8) return "no such numbers of keys and values";
    std::string misplaced = refused_layer_places(model, batch);
    if (!misplaced.empty()) return misplaced;
    int64_t head = head_elements(batch.kept, model.shape.head_dim, batch.block_size);
    int64_t own = 2 * head * model.block_kv_heads * block_layers(model, batch);
    if (batch.block_stride != 0 ? batch.block_stride < own : batch.layer_places != nullptr) return "blocks closer than this model's are large";
    std::string missing = incomplete(model);
    if (missing.empty()) missing = refused_page_blocks(model, batch);
    if (!missing.empty()) return missing;
    const int32_t *tokens = batch.tokens, *table = batch.tables, *windowed = batch.window_tables;
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
        if (found.empty()) found = refused_tree(batch, s, rows - batch.counts[s]);
        if (found.empty()) found = refused_windows(model, batch, s, windowed);
        if (found.empty()) found = refused_pages(model, batch, s);
        if (!found.empty()) return found;
        tokens += batch.counts[s];
        table += batch.table_lengths[s];
        windowed += window_entries(batch, s);
    }
    std::string found = refused_places(model, batch);
    if (found.empty()) found = refused_images(model, batch, rows);
    if (found.empty() && model.share) found = refused_by_share(model, batch, rows);
    return found.empty() ? refused_adapters(model, batch) : found;
}

void prepare(StepState &step, DiptychModel &model, const DiptychBatch &batch, int32_t threads, float *logits) {
    step.model = &model;
    step.batch = batch;
    step.logits = model.share ? model.share->exchange.logits() + model.share->first_token : logits;
    step.logit_stride = model.share ? model.share->vocab : model.shape.vocab;
    step.stopped = false;
    step.rows.clear();
    for (RowSet *set : {&step.all, &step.closing}) {
        set->rows.clear();
        set->tiles.clear();
    }
    step.places.clear();
    step.paths.clear();
    step.tree_floats = 0;
    step.tables.clear();
    step.wanted.clear();
    step.peaks.clear();
    step.live.assign(static_cast<size_t>(batch.sequences), 1);
    const int32_t *tokens = batch.tokens, *table = batch.tables, *turns = batch.turns, *ends = batch.ends;
    int64_t blocks = 0;
    for (int32_t s = 0; s < batch.sequences; s++) {
        int32_t first = static_cast<int32_t>(step.rows.size()), count = batch.counts[s];
        for (int32_t i = 0; i < count; i++) {
            int32_t lane = batch.starts[s] + i, turn = turns == nullptr ? lane : turns[i];
            step.rows.push_back({s, lane, tokens[i], turn, ends == nullptr ? lane + 1 : ends[i], lane, -1});
        }
        bool tree = lay_tree(step, s, first);
        add_rows(step.all, model, first, count, tree);
        add_rows(step.closing, model, first + count - batch.logit_rows[s], batch.logit_rows[s], tree);
        add_places(step, first, batch.starts[s], count);
        for (int32_t i = count - batch.logit_rows[s]; i < count; i++) want(step, first + i);
        step.tables.push_back(table);
        int64_t end = static_cast<int64_t>(batch.starts[s]) + count;
        blocks = std::max(blocks, (end + batch.block_size - 1) / batch.block_size);
        tokens += count;
        if (turns != nullptr) turns += count;
        if (ends != nullptr) ends += count;
        table += batch.table_lengths[s];
    }
    add_window_tables(step);
    prepare_states(step);
    grow_rows(step, model, static_cast<int64_t>(step.rows.size()));
    place_inputs(step);
    prepare_adapters(step);
    grow_scores(step, model, blocks, threads);
}

bool StepState::poll_aborts() {
    if (batch.abort_words == nullptr) return false;
    bool any = false;
    for (int32_t s = 0; s < batch.sequences; s++) {
        // Another thread stores here at any time; an aligned 32-bit load cannot tear.
        if (__atomic_load_n(&batch.abort_words[s], __ATOMIC_RELAXED) != 0) live[s] = 0;
        any = any || live[s] != 0;
    }
    return !any;
}

void StepState::tell_likeliest(int32_t *to) const {
    for (const WantedRow &wanted : wanted) {
        bool sampled = wanted.peaks >= 0 && is_live(wanted.row);
        *to++ = sampled ? likeliest(&peaks[static_cast<size_t>(wanted.peaks)], model->head.blocks) : -1;
    }
}

}  // namespace diptych
