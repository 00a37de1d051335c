#include "model_parts.h"

#include "expert_routing.h"
#include "kquants.h"
#include "model_share.h"
#include "recurrent_kinds.h"

namespace diptych {

namespace {

struct Expected {
    int32_t parts, rows[4], columns;
    int32_t most = parts;  // the last one may be left out where it is more
};

Layer *find_layer(DiptychModel &model, int32_t layer) {
    return layer < 0 || layer >= model.shape.layers ? nullptr : &model.layers[static_cast<size_t>(layer)];
}

Expected gate_up_parts(const DiptychShape &shape, int32_t width) {
    int32_t parts = shape.gated ? 2 : 1;
    return {parts, {width, width}, shape.hidden};
}

bool of_recurrence(int32_t which) { return which >= DIPTYCH_RECURRENT_IN && which <= DIPTYCH_RECURRENT_OUT; }

Expected joined(const std::vector<int32_t> &rows, int32_t columns) {
    Expected expected{static_cast<int32_t>(rows.size()), {}, columns};
    std::copy(rows.begin(), rows.end(), expected.rows);
    return expected;
}

// Of a layer that is recurrent.
Expected expected_of_recurrence(const DiptychModel &model, int32_t layer, int32_t which) {
    RecurrentSizes sizes = recurrent_sizes(model.layers[static_cast<size_t>(layer)].own.recurrent);
    int32_t hidden = model.shape.hidden;
    switch (which) {
        case DIPTYCH_RECURRENT_IN: return joined(sizes.in, hidden);
        case DIPTYCH_RECURRENT_SIDE: return joined(sizes.side, hidden);
        case DIPTYCH_RECURRENT_INNER: return {1, {sizes.inner_rows}, sizes.inner_columns};
        case DIPTYCH_RECURRENT_STEPS: return {1, {sizes.steps_rows}, sizes.steps_columns};
        default: return {1, {hidden}, sizes.width};
    }
}

Expected expected_parts(const DiptychModel &model, int32_t layer, int32_t which, bool expert) {
    if (of_recurrence(which)) return expected_of_recurrence(model, layer, which);
    const DiptychShape &shape = model.shape;
    int32_t inner = expert ? shape.experts.intermediate : shape.intermediate, shared = shape.experts.shared_intermediate;
    switch (which) {
        case DIPTYCH_QKV: {
            int32_t queries = model.query_width(), keys = model.kv_width();
            return {shape.attention_gate ? 4 : 3, {queries, keys, keys, queries}, shape.hidden};
        }
        case DIPTYCH_OUTPUT: return {1, {shape.hidden}, model.query_width()};
        case DIPTYCH_GATE_UP: return gate_up_parts(shape, inner);
        case DIPTYCH_DOWN: return {1, {shape.hidden}, inner};
        case DIPTYCH_ROUTER: return {1, {shape.experts.count, 1}, shape.hidden, shared > 0 ? 2 : 1};
        case DIPTYCH_SHARED_GATE_UP: return gate_up_parts(shape, shared);
        case DIPTYCH_SHARED_DOWN: return {1, {shape.hidden}, shared};
        default: return {1, {shape.vocab}, shape.hidden};
    }
}

bool in_blocks(int32_t format) {
    return (format >= DIPTYCH_Q4_0 && format <= DIPTYCH_Q8_0) || is_kquant(format) || has_table(format);
}

// Whether the parts of a matrix may have the formats that they have. One block of columns has one format.
bool formats_join(const DiptychMatrix *parts, int32_t count, int32_t which) {
    for (int32_t p = 0; p < count; p++) {
        if (is_kquant(parts[p].format) && parts[p].columns % kSuper != 0) return false;
        if (parts[p].format == parts[0].format) continue;
        bool joins = which == DIPTYCH_QKV || which == DIPTYCH_RECURRENT_IN;
        if (!joins || !in_blocks(parts[0].format)) return false;
        for (int32_t before = 0; before < p; before++) {
            if (parts[before].rows % kColumns != 0) return false;
        }
    }
    return true;
}

bool format_fits(const DiptychModel &model, int32_t which, int32_t format) {
    if (in_fp32(which)) return format == DIPTYCH_DENSE;
    switch (model.shape.dtype) {
        case DIPTYCH_BLOCKS: return in_blocks(format);
        case DIPTYCH_BYTES: return format == DIPTYCH_I8 || format == DIPTYCH_I8_CODED;
        default: return format == DIPTYCH_DENSE;
    }
}

std::string refused_experts(const DiptychExperts &experts) {
    constexpr int32_t limit = 1 << 16;
    if (experts.count < 0 || experts.count > limit) return "experts must be 0 .. 65536";
    if (experts.count == 0) return "";
    if (experts.picked < 1 || experts.picked > experts.count) return "a row picks from 1 expert to all of them";
    if (experts.intermediate < 1 || experts.intermediate > 1 << 24) return "experts have no width";
    if (experts.shared_intermediate < 0 || experts.shared_intermediate > 1 << 24) return "the shared expert has no width";
    if (experts.routing < DIPTYCH_SOFTMAX_THEN_TOPK || experts.routing > DIPTYCH_SIGMOID) return "no such routing";
    if (experts.groups < 1 || experts.count % experts.groups != 0) return "experts do not form groups of one size";
    if (experts.groups > kMostExpertGroups) return "experts form more than 64 groups";
    if (experts.picked_groups < 1 || experts.picked_groups > experts.groups) return "no such number of groups";
    int32_t open = experts.count / experts.groups * experts.picked_groups;
    return experts.picked > open ? "a row picks more experts than its groups have" : "";
}

bool whole_feed_forward(const DiptychModel &model, const Layer &layer) {
    if (!layer.own.feed_forward) return true;
    if (!layer.own.experts) return layer.gate_up.data && layer.down.data;
    bool shared = model.shape.experts.shared_intermediate > 0;
    bool whole = layer.router.data && (!shared || (layer.shared_gate_up.data && layer.shared_down.data));
    for (const Expert &expert : layer.experts) whole = whole && expert.gate_up.data && expert.down.data;
    return whole;
}

bool whole_layer(const DiptychModel &model, const Layer &layer) {
    const DiptychShape &shape = model.shape;
    bool before = layer.own.norms_before != 0, after = layer.own.norms_after != 0;
    bool attends = layer.own.attention != 0, mixes = attends || layer.is_recurrent(), feeds = layer.own.feed_forward != 0;
    return (!attends || layer.qkv.data) && whole_recurrence(layer) &&
           layer.input_norm.empty() != (before && mixes) && layer.post_norm.empty() != (before && feeds) &&
           layer.attention_output_norm.empty() != (after && mixes) &&
           layer.feed_forward_output_norm.empty() != (after && feeds) &&
           layer.query_norm.empty() == layer.key_norm.empty() &&
           layer.sinks.empty() != (attends && shape.sinks != 0);
}

bool whole_sublayers(const DiptychModel &model, const Layer &layer) {
    return (!layer.own.attention || layer.output.data) && whole_feed_forward(model, layer);
}

}  // namespace

Linear *find_linear(DiptychModel &model, int32_t layer, int32_t which) {
    if (which == DIPTYCH_HEAD) return &model.head;
    Layer *found = find_layer(model, layer);
    if (found == nullptr) return nullptr;
    if (of_recurrence(which) && !found->is_recurrent()) return nullptr;
    bool experts = found->own.experts != 0, shared = experts && model.shape.experts.shared_intermediate > 0;
    switch (which) {
        case DIPTYCH_QKV: return &found->qkv;
        case DIPTYCH_OUTPUT: return &found->output;
        case DIPTYCH_GATE_UP: return experts ? nullptr : &found->gate_up;
        case DIPTYCH_DOWN: return experts ? nullptr : &found->down;
        case DIPTYCH_ROUTER: return experts ? &found->router : nullptr;
        case DIPTYCH_SHARED_GATE_UP: return shared ? &found->shared_gate_up : nullptr;
        case DIPTYCH_SHARED_DOWN: return shared ? &found->shared_down : nullptr;
        case DIPTYCH_RECURRENT_IN: return &found->recurrent.in;
        case DIPTYCH_RECURRENT_SIDE: return &found->recurrent.side;
        case DIPTYCH_RECURRENT_INNER: return &found->recurrent.inner;
        case DIPTYCH_RECURRENT_STEPS: return &found->recurrent.steps;
        case DIPTYCH_RECURRENT_OUT: return &found->recurrent.out;
        default: return nullptr;
    }
}

Linear *find_expert(DiptychModel &model, int32_t layer, int32_t expert, int32_t which) {
    Layer *found = find_layer(model, layer);
    if (found == nullptr || expert < 0 || expert >= static_cast<int32_t>(found->experts.size())) return nullptr;
    Expert &of = found->experts[static_cast<size_t>(expert)];
    return which == DIPTYCH_GATE_UP ? &of.gate_up : which == DIPTYCH_DOWN ? &of.down : nullptr;
}

std::vector<float> *find_vector(DiptychModel &model, int32_t layer, int32_t which) {
    if (which == DIPTYCH_FINAL_NORM) return &model.final_norm;
    Layer *found = find_layer(model, layer);
    if (found == nullptr) return nullptr;
    if (which >= DIPTYCH_FILTER && which <= DIPTYCH_C_NORM) {
        return found->is_recurrent() ? &found->recurrent.vectors[which - DIPTYCH_FILTER] : nullptr;
    }
    switch (which) {
        case DIPTYCH_INPUT_NORM: return &found->input_norm;
        case DIPTYCH_POST_NORM: return &found->post_norm;
        case DIPTYCH_QUERY_NORM: return &found->query_norm;
        case DIPTYCH_KEY_NORM: return &found->key_norm;
        case DIPTYCH_ATTENTION_OUTPUT_NORM: return &found->attention_output_norm;
        case DIPTYCH_FEED_FORWARD_OUTPUT_NORM: return &found->feed_forward_output_norm;
        case DIPTYCH_SINKS: return &found->sinks;
        case DIPTYCH_ROUTER_CORRECTION: return found->own.experts ? &found->router_correction : nullptr;
        default: return nullptr;
    }
}

bool vector_fits(const DiptychModel &model, int32_t layer, int32_t which, int32_t size) {
    const DiptychShape &shape = model.shape;
    if (which >= DIPTYCH_FILTER) {
        return size == recurrent_sizes(model.layers[static_cast<size_t>(layer)].own.recurrent).vector(which);
    }
    switch (which) {
        case DIPTYCH_QUERY_NORM: return size == shape.head_dim || size == model.query_width();
        case DIPTYCH_KEY_NORM: return size == shape.head_dim || size == model.kv_width();
        case DIPTYCH_SINKS: return size == shape.heads;
        case DIPTYCH_ROUTER_CORRECTION: return size == shape.experts.count;
        default: return size == shape.hidden;
    }
}

std::string refused_layer(const DiptychModel &model, const DiptychLayer &own) {
    if (own.window < 0) return "a window holds at least one token";
    if (own.rotation < -1) return "no such rotary table";
    if (own.experts && !model.has_experts()) return "the model has no experts";
    bool recurs = own.recurrent.kind != DIPTYCH_NOT_RECURRENT;
    if (!own.attention && !recurs && !own.feed_forward) return "a layer computes nothing";
    if (own.experts && !own.feed_forward) return "a layer without a feed-forward has experts";
    if (!own.norms_before && !own.norms_after) return "sublayers have no norm";
    if (model.share && (recurs || !own.attention || !own.feed_forward)) return "a share's layers attend, and have a feed-forward";
    return refused_recurrence(own.recurrent);
}

bool in_fp32(int32_t which) {  // a rounding of a router's picks another expert
    return which == DIPTYCH_ROUTER || which == DIPTYCH_RECURRENT_SIDE;
}

std::string refused_parts(const DiptychModel &model, int32_t layer, int32_t which, bool expert, const DiptychMatrix *parts,
                          int32_t count) {
    Expected expected = expected_parts(model, layer, which, expert);
    if (count < expected.parts || count > expected.most) return "the matrix has another number of parts";
    for (int32_t p = 0; p < count; p++) {
        if (parts[p].rows != expected.rows[p] || parts[p].columns != expected.columns) {
            return "the matrix has another size";
        }
    }
    return refused_formats(model, which, parts, count);
}

std::string refused_formats(const DiptychModel &model, int32_t which, const DiptychMatrix *parts, int32_t count) {
    for (int32_t p = 0; p < count; p++) {
        if (!format_fits(model, which, parts[p].format) || !formats_join(parts, count, which)) {
            return "the matrix has a format that the model's dtype does not have";
        }
        bool coded = parts[p].format == DIPTYCH_I8_CODED;
        if ((coded || parts[p].format == DIPTYCH_I8) != (parts[p].scales != nullptr)) {
            return "matrices of bytes have scales, and no others do";
        }
        if (coded != (parts[p].slopes != nullptr)) return "matrices in codes have slopes, and no others do";
    }
    return "";
}

std::string refused_shape(const DiptychShape &s, bool shared) {
    constexpr int32_t limit = 1 << 24;
    const std::string sizes = "the model's sizes are not those of a decoder";
    for (int32_t size : {s.layers, s.hidden, s.intermediate, s.heads, s.kv_heads, s.head_dim, s.vocab}) {
        if (size < 1 || size > limit) return sizes;
    }
    int64_t width = static_cast<int64_t>(s.heads + 2LL * s.kv_heads) * s.head_dim;
    bool even = shared || s.heads % s.kv_heads == 0;
    if (!even || s.head_dim % 2 != 0 || width > limit) return sizes;
    if (s.activation < DIPTYCH_SILU || s.activation > DIPTYCH_CLAMPED_SWIGLU) return "no such activation";
    if (s.activation == DIPTYCH_CLAMPED_SWIGLU && (!s.gated || !(s.clamp > 0.0f))) {
        return "a clamped activation has a gate and a bound";
    }
    if (s.growth_length < 0) return "queries grow after a length below 0";
    return refused_experts(s.experts);
}

std::string incomplete(const DiptychModel &model) {
    bool embeds = model.embedding != nullptr || model.embeds_from_head;
    bool needs_head = !model.share || model.share->last_stage;
    if (model.share && !model.share->first_stage) embeds = true;
    if (!embeds || model.positions < 1) return "the model has no embedding or no rotary tables";
    if ((needs_head && !model.head.data) || model.final_norm.empty()) return "the model has no head or no final norm";
    for (int32_t index = 0; index < model.shape.layers; index++) {
        const Layer &layer = model.layers[static_cast<size_t>(index)];
        bool products = model.share ? model.share->whole(index, layer) : whole_sublayers(model, layer);
        if (!products || !whole_layer(model, layer)) return "a layer of the model is incomplete";
        if (layer.own.rotation >= static_cast<int32_t>(model.rotations.size())) {
            return "a layer has a rotary table that is not there";
        }
    }
    return "";
}

}  // namespace diptych
