#include "expert_routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace diptych {

namespace {

constexpr float kLeastSum = 1e-20f;  // added to the sum that sigmoids are divided by, as DeepSeek-V3 has it

// x becomes its softmax, summed from first to last.
void softmax(float *x, int32_t count) {
    float greatest = *std::max_element(x, x + count), sum = 0.0f;
    for (int32_t i = 0; i < count; i++) sum += x[i] = std::exp(x[i] - greatest);
    for (int32_t i = 0; i < count; i++) x[i] /= sum;
}

void sigmoid(float *x, int32_t count) {
    for (int32_t i = 0; i < count; i++) x[i] = 1.0f / (1.0f + std::exp(-x[i]));
}

// A candidate by value, and of equal ones by number.
struct Candidate {
    float value = -std::numeric_limits<float>::infinity();
    int32_t number = -1;

    bool precedes(const Candidate &other) const {
        return value > other.value || (value == other.value && number < other.number);
    }
};

// The best candidate that comes after `last`, none if there is none.
template <class Value>
Candidate best_after(const Candidate *last, int32_t count, Value value_of) {
    Candidate best;
    for (int32_t i = 0; i < count; i++) {
        Candidate now{value_of(i), i};
        bool later = now.value == now.value && (last == nullptr || last->precedes(now));
        if (later && (best.number < 0 || now.precedes(best))) best = now;
    }
    return best;
}

struct Choice {
    const DiptychExperts &experts;
    const float *scores, *correction;

    float value(int32_t expert) const { return scores[expert] + (correction != nullptr ? correction[expert] : 0.0f); }

    float group_value(int32_t group) const {
        int32_t size = experts.count / experts.groups;
        auto of_group = [&](int32_t i) { return value(group * size + i); };
        Candidate best = best_after(nullptr, size, of_group);
        if (!experts.best_two || size < 2) return best.value;
        return best.value + best_after(&best, size, of_group).value;
    }

    // A bit for each group that experts are picked from.
    uint64_t open_groups() const {
        uint64_t open = 0;
        Candidate last;
        for (int32_t n = 0; n < experts.picked_groups; n++) {
            auto value_of = [this](int32_t group) { return group_value(group); };
            last = best_after(n == 0 ? nullptr : &last, experts.groups, value_of);
            if (last.number >= 0) open |= uint64_t{1} << last.number;
        }
        return open;
    }
};

// Whether there were as many as are wanted.
bool pick(const Choice &choice, int32_t *picked) {
    const DiptychExperts &experts = choice.experts;
    uint64_t open = experts.picked_groups < experts.groups ? choice.open_groups() : ~uint64_t{0};
    int32_t size = experts.count / experts.groups;
    auto value_of = [&](int32_t e) {
        return (open >> (e / size) & 1) != 0 ? choice.value(e) : std::numeric_limits<float>::quiet_NaN();
    };
    Candidate last;
    for (int32_t n = 0; n < experts.picked; n++) {
        last = best_after(n == 0 ? nullptr : &last, experts.count, value_of);
        if (last.number < 0) return false;
        picked[n] = last.number;
    }
    return true;
}

}  // namespace

void pick_experts(const DiptychExperts &experts, float *logits, const float *correction, int32_t *picked,
                  float *weights) {
    int32_t count = experts.picked;
    bool finite = std::all_of(logits, logits + experts.count, [](float x) { return std::isfinite(x); });
    if (experts.routing == DIPTYCH_SOFTMAX_THEN_TOPK) softmax(logits, experts.count);
    if (experts.routing == DIPTYCH_SIGMOID) sigmoid(logits, experts.count);
    if (!finite || !pick({experts, logits, correction}, picked)) {
        for (int32_t n = 0; n < count; n++) picked[n] = n;
        std::fill(weights, weights + count, std::numeric_limits<float>::quiet_NaN());
        return;
    }
    std::sort(picked, picked + count);
    for (int32_t n = 0; n < count; n++) weights[n] = logits[picked[n]];
    if (experts.routing == DIPTYCH_TOPK_THEN_SOFTMAX) {
        softmax(weights, count);
    } else if (experts.normalise) {
        float sum = 0.0f, least = experts.routing == DIPTYCH_SIGMOID ? kLeastSum : 0.0f;
        for (int32_t n = 0; n < count; n++) sum += weights[n];
        for (int32_t n = 0; n < count; n++) weights[n] /= sum + least;
    }
    for (int32_t n = 0; n < count; n++) weights[n] *= experts.scale;
}

}  // namespace diptych
