#include "part_experts.h"

#include "model_share.h"

namespace diptych {

namespace {

// Parts of one width use the same numbers, one after the other. Those of another width have their own: what a wider part
// left would not be the padding of a narrower one.
int64_t begin_of(std::vector<int32_t> &widths, int32_t width, int64_t &end) {
    int64_t begin = 0;
    for (int32_t before : widths) {
        if (before == width) return begin;
        begin += round_up(before, kDepth);
    }
    widths.push_back(width);
    end = begin + round_up(width, kDepth);
    return begin;
}

}  // namespace

std::vector<PartExperts> place_experts(const DiptychShare &share, int64_t &width, int64_t &shared_width) {
    std::vector<PartExperts> found;
    std::vector<int32_t> widths;
    for (int32_t part = 0; share.experts != nullptr && part < share.own_parts; part++) {
        const DiptychPartExperts &own = share.experts[part];
        found.push_back({own, begin_of(widths, own.intermediate, width), shared_width});
        shared_width += round_up(own.shared_intermediate, kDepth);  // all parts' at once
    }
    return found;
}

std::string refused_experts_of_parts(const DiptychShape &shape, const DiptychShare &share) {
    const DiptychExperts &experts = shape.experts;
    if ((share.experts != nullptr) != (experts.count > 0)) return "parts have experts where the model has them";
    for (int32_t part = 0; share.experts != nullptr && part < share.own_parts; part++) {
        const DiptychPartExperts &own = share.experts[part];
        if (own.first < 0 || own.first >= own.end || own.end > experts.count) return "a part has no such experts";
        if (own.intermediate < 1 || own.intermediate > experts.intermediate) return "experts of a part have no such width";
        if (own.shared_intermediate < 0 || own.shared_intermediate > experts.shared_intermediate) {
            return "the shared expert of a part has no such width";
        }
        if ((own.shared_intermediate > 0) != (experts.shared_intermediate > 0)) return "all parts have a shared expert, or none";
    }
    return "";
}

void resize_part_experts(ModelShare &share, int32_t layer, bool experts) {
    for (size_t part = 0; part < share.experts.size(); part++) {
        const DiptychPartExperts &own = share.experts[part].own;
        auto count = static_cast<size_t>(experts ? own.end - own.first : 0);
        share.layers[static_cast<size_t>(layer)][part].experts.resize(count);
    }
}

Linear *find_part_expert(DiptychModel &model, int32_t layer, int32_t part, int32_t expert, int32_t which) {
    if (model.share == nullptr || layer < 0 || layer >= model.shape.layers) return nullptr;
    if (part < 0 || part >= static_cast<int32_t>(model.share->experts.size())) return nullptr;
    auto &own = model.share->layers[static_cast<size_t>(layer)][static_cast<size_t>(part)].experts;
    int64_t place = int64_t{expert} - model.share->experts[static_cast<size_t>(part)].own.first;
    if (place < 0 || place >= static_cast<int64_t>(own.size())) return nullptr;
    Expert &of = own[static_cast<size_t>(place)];
    return which == DIPTYCH_GATE_UP ? &of.gate_up : which == DIPTYCH_DOWN ? &of.down : nullptr;
}

}  // namespace diptych
