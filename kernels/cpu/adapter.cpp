#include "adapter.h"

#include <algorithm>
#include <cstring>

#include "model.h"
#include "model_share.h"
#include "step_state.h"

namespace diptych {

namespace {

// A matrix of a recurrence; null: there is none.
const Linear *recurrent_matrix(const Recurrence &recurrent, int32_t which) {
    switch (which) {
        case DIPTYCH_RECURRENT_IN: return &recurrent.in;
        case DIPTYCH_RECURRENT_SIDE: return &recurrent.side;
        case DIPTYCH_RECURRENT_INNER: return &recurrent.inner;
        case DIPTYCH_RECURRENT_STEPS: return &recurrent.steps;
        case DIPTYCH_RECURRENT_OUT: return &recurrent.out;
        default: return nullptr;
    }
}

// The matrix that a change is of; null: there is none.
const Linear *changed_matrix(const DiptychModel &model, const DiptychChange &change) {
    const Layer &layer = model.layers[static_cast<size_t>(change.layer)];
    if (change.which == DIPTYCH_QKV) return change.own_part == 0 ? &layer.qkv : nullptr;
    if (change.which > DIPTYCH_DOWN) {
        return change.own_part == 0 ? recurrent_matrix(layer.recurrent, change.which) : nullptr;
    }
    if (model.share == nullptr) {
        const Linear *products[] = {&layer.output, &layer.gate_up, &layer.down};
        return change.own_part == 0 ? products[change.which - DIPTYCH_OUTPUT] : nullptr;
    }
    if (change.own_part < 0 || change.own_part >= model.share->own_parts) return nullptr;
    const PartProducts &part =
        model.share->layers[static_cast<size_t>(change.layer)][static_cast<size_t>(change.own_part)];
    const Linear *products[] = {&part.output, &part.gate_up, &part.down};
    return products[change.which - DIPTYCH_OUTPUT];
}

// Puts the adapted rows of a set in order: adapters as they first come, and the rows of each together.
void arrange(RowSet &set) {
    std::vector<const DiptychAdapter *> seen;
    for (const DiptychAdapter *adapter : set.adapters) {
        if (adapter != nullptr && std::find(seen.begin(), seen.end(), adapter) == seen.end()) seen.push_back(adapter);
    }
    for (const DiptychAdapter *adapter : seen) {
        auto begin = static_cast<int32_t>(set.adapted.size());
        for (int32_t place = 0; place < set.size(); place++) {
            if (set.adapters[static_cast<size_t>(place)] == adapter) set.adapted.push_back(place);
        }
        auto end = static_cast<int32_t>(set.adapted.size());
        for (int32_t first = begin; first < end; first += kAdapterRows) {
            set.adapter_tiles.push_back({adapter, first, std::min(kAdapterRows, end - first)});
        }
    }
}

}  // namespace

std::string refused_adapters(const DiptychModel &model, const DiptychBatch &batch) {
    for (int32_t s = 0; batch.adapters != nullptr && s < batch.sequences; s++) {
        int32_t slot = batch.adapters[s];
        if (slot < -1 || slot >= static_cast<int32_t>(model.adapters.size()) ||
            (slot >= 0 && model.adapters[static_cast<size_t>(slot)] == nullptr)) {
            return "sequence " + std::to_string(s) + ": no adapter in slot " + std::to_string(slot);
        }
    }
    return "";
}

std::string refused_change(const DiptychModel &model, const DiptychChange &change) {
    if (change.layer < 0 || change.layer >= model.shape.layers) return "no such layer";
    bool known = (change.which >= DIPTYCH_QKV && change.which <= DIPTYCH_DOWN) ||
                 (change.which >= DIPTYCH_RECURRENT_IN && change.which <= DIPTYCH_RECURRENT_OUT);
    if (!known) return "no such product";
    const Linear *found = changed_matrix(model, change);
    if (found == nullptr || (found->data == nullptr && found->section_count == 0)) return "the layer has no such product";
    const Linear &matrix = *found;
    if (change.a == nullptr || change.scales == nullptr || change.ranks < 1) return "a change without A";
    if (change.depth != round_up(matrix.in, kDepth)) return "A has another width than the product's input";
    if (change.parts < 1 || change.parts > DIPTYCH_CHANGE_PARTS || (change.interleaved && change.parts != 2)) return "no such parts";
    int64_t strips = 0;
    for (int32_t p = 0; p < change.parts; p++) {
        const DiptychChangePart &part = change.part[p];
        strips += part.strips;
        if (part.begin < 0 || part.ranks < 0 || part.begin + part.ranks > change.ranks) return "no such ranks";
    }
    if (strips > int64_t{matrix.blocks} * (kColumns / kAdapterStrip)) return "B has more columns than the product";
    return "";
}

void add_change(DiptychAdapter &adapter, const DiptychModel &model, const DiptychChange &change) {
    auto copied = [&](const void *from, int64_t count, size_t number) {
        int64_t bytes = count * static_cast<int64_t>(number);
        return std::memcpy(adapter.memory.take(bytes), from, static_cast<size_t>(bytes));
    };
    size_t number = model.shape.dtype == DIPTYCH_FP32 ? sizeof(float) : sizeof(bf16);
    DiptychChange &to = adapter.of(change.layer, change.own_part)[static_cast<size_t>(change.which)];
    to = change;
    to.scales = static_cast<const float *>(copied(change.scales, change.ranks, sizeof(float)));
    to.a = copied(change.a, int64_t{change.ranks} * change.depth, number);
    for (int32_t p = 0; p < to.parts; p++) {
        DiptychChangePart &part = to.part[p];
        if (part.b != nullptr) part.b = copied(part.b, int64_t{part.strips} * part.ranks * kAdapterStrip, number);
    }
    adapter.most_ranks = std::max(adapter.most_ranks, to.ranks);
}

void prepare_adapters(StepState &step) {
    const DiptychBatch &batch = step.batch;
    int32_t ranks = 0;
    for (int32_t s = 0; batch.adapters != nullptr && s < batch.sequences; s++) {
        if (batch.adapters[s] < 0) continue;
        ranks = std::max(ranks, step.model->adapters[static_cast<size_t>(batch.adapters[s])]->most_ranks);
    }
    for (RowSet *set : {&step.all, &step.closing}) {
        set->adapters.clear();
        set->adapted.clear();
        set->adapter_tiles.clear();
        if (ranks == 0) continue;
        for (int32_t row : set->rows) {
            int32_t slot = batch.adapters[step.rows[static_cast<size_t>(row)].sequence];
            set->adapters.push_back(slot < 0 ? nullptr : step.model->adapters[static_cast<size_t>(slot)]);
        }
        arrange(*set);
    }
    if (ranks == 0) return;
    int64_t stride = std::max(step.shrunk_stride, round_up(ranks, kAdapterStrip));
    int64_t rows = std::max(step.shrunk_rows, step.all.size());
    if (stride > step.shrunk_stride || rows > step.shrunk_rows) {
        step.shrunk = zeroed(rows * stride * static_cast<int64_t>(sizeof(float)));
        step.shrunk_stride = stride;
        step.shrunk_rows = rows;
    }
}

}  // namespace diptych
