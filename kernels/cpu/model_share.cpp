#include "model_share.h"

#include <algorithm>
#include <cstring>

#include "model_parts.h"
#include "pack.h"
#include "step_state.h"

namespace diptych {

namespace {

// Where each part's values begin, of parts that end there: a product's input is padded.
std::vector<int64_t> begins(const std::vector<int32_t> &ends, int32_t width) {
    std::vector<int64_t> found{0};
    int32_t before = 0;
    for (int32_t end : ends) {
        found.push_back(found.back() + round_up(int64_t{end - before} * width, kDepth));
        before = end;
    }
    return found;
}

bool ascends_to(const int32_t *ends, int32_t count, int32_t last) {
    for (int32_t i = 0; i < count; i++) {
        if (ends[i] <= (i == 0 ? 0 : ends[i - 1])) return false;
    }
    return ends[count - 1] == last;
}

// Where queries and keys are normed over all heads.
std::string refused_counted(const DiptychShape &shape, const DiptychShare &share) {
    if ((share.query_lanes > 0) != (share.key_lanes > 0)) return "queries and keys are normed over all heads, or neither";
    if (share.query_lanes == 0) return "";
    if (share.query_lanes < shape.heads * shape.head_dim || share.key_lanes < shape.kv_heads * shape.head_dim) {
        return "a rank has more heads than the model";
    }
    for (int32_t part = 0; part < share.own_parts; part++) {
        int32_t begin = share.counted[2 * part], end = share.counted[2 * part + 1];
        if (begin < 0 || begin > end || end > shape.kv_heads) return "a part counts KV heads that are not there";
    }
    return "";
}

// Sizes of a part's matrices.
struct PartSizes {
    int32_t rows, columns, count;
};

PartSizes sizes_of(const DiptychModel &model, int32_t part, int32_t which, bool expert) {
    const DiptychShape &shape = model.shape;
    const ModelShare &share = *model.share;
    int32_t gates = shape.gated ? 2 : 1, inner = share.inner(part);
    if (!share.experts.empty()) {
        const DiptychPartExperts &own = share.experts[static_cast<size_t>(part)].own;
        if (expert) inner = own.intermediate;
        if (which == DIPTYCH_SHARED_GATE_UP || which == DIPTYCH_SHARED_DOWN) inner = own.shared_intermediate;
    }
    switch (which) {
        case DIPTYCH_GATE_UP:
        case DIPTYCH_SHARED_GATE_UP: return {inner, shape.hidden, gates};
        case DIPTYCH_DOWN:
        case DIPTYCH_SHARED_DOWN: return {shape.hidden, inner, 1};
        default: return {shape.hidden, share.query_heads(part) * shape.head_dim, 1};
    }
}

// What this rank found likeliest of a row, by its number among all tokens.
Peak own_peak(const StepState &step, int64_t peaks) {
    const DiptychModel &model = *step.model;
    const Peak *of_row = &step.peaks[static_cast<size_t>(peaks)];
    int32_t best = 0;
    for (int32_t b = 1; b < model.head.blocks; b++) {
        if (of_row[b].key > of_row[best].key) best = b;
    }
    return {of_row[best].key, model.share->first_token + best * kColumns + of_row[best].column};
}

// Of all ranks: of equal numbers the first token, -1 if one is not finite.
int32_t likeliest_of_all(const ModelShare &share, int64_t place) {
    Peak best{};
    for (int32_t rank = 0; rank < share.ranks; rank++) {
        Peak peak;
        std::memcpy(&peak, share.exchange.filled(int64_t{rank} * share.own_parts, place), sizeof peak);
        if (rank == 0 || peak.key > best.key) best = peak;
    }
    return best.key == kNotFinite ? -1 : best.column;
}

}  // namespace

ModelShare::ModelShare(const DiptychShape &shape, const DiptychShare &share)
    : ranks(share.ranks),
      rank(share.rank),
      own_parts(share.own_parts),
      vocab(share.vocab),
      first_token(share.first_token),
      first_stage(share.first_stage != 0),
      last_stage(share.last_stage != 0),
      head_ends(share.head_ends, share.head_ends + share.own_parts),
      inner_ends(share.inner_ends, share.inner_ends + share.own_parts),
      mixed_begins(begins(head_ends, shape.head_dim)),
      inner_begins(begins(inner_ends, 1)),
      experts(place_experts(share, expert_width, shared_width)),
      query_lanes(share.query_lanes),
      key_lanes(share.key_lanes),
      counted(share.counted, share.counted + (share.query_lanes > 0 ? 2 * share.own_parts : 0)),
      layers(static_cast<size_t>(shape.layers), std::vector<PartProducts>(static_cast<size_t>(share.own_parts))),
      exchange(share.file, share.ranks, share.rank, share.ranks * share.own_parts, round_up(shape.hidden, kDepth)) {}

bool ModelShare::whole(int32_t layer, const Layer &of) const {
    const auto &of_layer = layers[static_cast<size_t>(layer)];
    bool routed = of.own.experts != 0, shared = has_shared();
    auto has_all = [](const Expert &expert) { return expert.gate_up.data && expert.down.data; };
    return (!routed || of.router.data) && std::all_of(of_layer.begin(), of_layer.end(), [&](const PartProducts &part) {
        if (!part.output.data) return false;
        if (!routed) return part.gate_up.data && part.down.data;
        if (shared && !(part.shared_gate_up.data && part.shared_down.data)) return false;
        return std::all_of(part.experts.begin(), part.experts.end(), has_all);
    });
}

std::string refused_share(const DiptychShape &shape, const DiptychShare &share) {
    if (share.ranks < 1 || share.ranks > 1024 || share.rank < 0 || share.rank >= share.ranks) return "no such rank";
    if (share.own_parts < 1 || share.own_parts > 1024) return "a rank has 1 to 1024 parts";
    if (shape.dtype == DIPTYCH_BLOCKS) return "matrices in blocks are not computed in parts";
    if (!ascends_to(share.head_ends, share.own_parts, shape.heads)) return "parts do not have all query heads";
    if (!ascends_to(share.inner_ends, share.own_parts, shape.intermediate)) return "parts do not have all inner numbers";
    if (!ascends_to(share.group_ends, shape.kv_heads, shape.heads)) return "KV heads do not have all query heads";
    if (share.block_kv_heads < shape.kv_heads) return "blocks have fewer KV heads than the rank";
    for (const std::string &found : {refused_experts_of_parts(shape, share), refused_counted(shape, share)}) {
        if (!found.empty()) return found;
    }
    bool inside = share.first_token >= 0 && share.first_token <= share.vocab - shape.vocab;
    return inside ? "" : "the rank's tokens are not in the vocabulary";
}

void place_heads(DiptychModel &model, const DiptychShare &share) {
    const ModelShare &own = *model.share;
    model.head_ends.assign(share.group_ends, share.group_ends + model.shape.kv_heads);
    int32_t head = 0;
    for (int32_t part = 0; part < own.own_parts; part++) {
        int64_t place = own.mixed_begins[static_cast<size_t>(part)];
        for (int32_t i = 0; i < own.query_heads(part); i++, place += model.shape.head_dim) {
            model.mixed_places[static_cast<size_t>(head++)] = place;
        }
    }
    model.block_kv_heads = share.block_kv_heads;
}

Linear *find_part_linear(DiptychModel &model, int32_t layer, int32_t part, int32_t which) {
    if (model.share == nullptr || layer < 0 || layer >= model.shape.layers) return nullptr;
    if (part < 0 || part >= model.share->own_parts) return nullptr;
    PartProducts &products = model.share->layers[static_cast<size_t>(layer)][static_cast<size_t>(part)];
    bool routed = model.layers[static_cast<size_t>(layer)].own.experts != 0, shared = routed && model.share->has_shared();
    switch (which) {
        case DIPTYCH_OUTPUT: return &products.output;
        case DIPTYCH_GATE_UP: return routed ? nullptr : &products.gate_up;
        case DIPTYCH_DOWN: return routed ? nullptr : &products.down;
        case DIPTYCH_SHARED_GATE_UP: return shared ? &products.shared_gate_up : nullptr;
        case DIPTYCH_SHARED_DOWN: return shared ? &products.shared_down : nullptr;
        default: return nullptr;
    }
}

std::string refused_part_linear(const DiptychModel &model, int32_t part, int32_t which, bool expert,
                                const DiptychMatrix *matrices, int32_t count) {
    PartSizes sizes = sizes_of(model, part, which, expert);
    if (count != sizes.count) return "the matrix has another number of parts";
    for (int32_t i = 0; i < count; i++) {
        if (matrices[i].rows != sizes.rows || matrices[i].columns != sizes.columns) return "the matrix has another size";
    }
    return refused_formats(model, which, matrices, count);
}

std::string refused_by_share(const DiptychModel &model, const DiptychBatch &batch, int64_t rows) {
    const ModelShare &share = *model.share;
    int64_t wanted = 0;
    for (int32_t s = 0; s < batch.sequences; s++) wanted += batch.logit_rows[s];
    if (rows > share.exchange.most_rows() || wanted * share.vocab > RankExchange::most_logits()) {
        return "more tokens than the exchange of ranks can hold";
    }
    if (batch.block_stride == 0) return "a rank of a group is told the stride of blocks";
    if ((batch.enters == nullptr) != share.first_stage || (batch.leaves == nullptr) != share.last_stage) {
        return "rows enter where layers are not the model's first, and leave where they are not its last";
    }
    return wanted == 0 || share.last_stage ? "" : "logits come from the last layers";
}

void leave_peaks(StepState &step) {
    const ModelShare &share = *step.model->share;
    int64_t place = 0;
    for (const WantedRow &wanted : step.wanted) {
        if (wanted.peaks < 0) continue;
        Peak peak = own_peak(step, wanted.peaks);
        std::memcpy(share.exchange.slot(share.part(0), place++), &peak, sizeof peak);
    }
}

void take_results(const StepState &step, float *logits, int32_t *likeliest) {
    const ModelShare &share = *step.model->share;
    int64_t place = 0, rows = 0;
    for (const WantedRow &wanted : step.wanted) {
        bool greedy = wanted.peaks >= 0;
        rows += greedy ? 0 : 1;
        int32_t token = greedy ? likeliest_of_all(share, place++) : -1;
        if (likeliest != nullptr) *likeliest++ = step.is_live(wanted.row) ? token : -1;
    }
    if (logits != nullptr && rows > 0) {
        std::memcpy(logits, share.exchange.logits(), static_cast<size_t>(rows * share.vocab) * sizeof(float));
    }
}

}  // namespace diptych
