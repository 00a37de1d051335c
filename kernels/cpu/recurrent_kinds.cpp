#include "recurrent_kinds.h"

#include "recurrent_step.h"

#include <algorithm>
#include <numeric>

namespace diptych {

namespace {

// Where layers' states begin in a page (diptych/engine/kv/state_layout.py).
constexpr int64_t kPageUnit = 64;

RecurrentSizes short_conv_sizes(const DiptychRecurrent &own) {
    RecurrentSizes sizes;
    int64_t channels = own.channels;
    sizes.in = {3 * own.channels};
    sizes.width = own.channels;
    sizes.states = {(own.taps - 1) * channels};
    sizes.vector(DIPTYCH_FILTER) = own.taps * channels;
    sizes.vector(DIPTYCH_FILTER_BIAS) = channels;
    return sizes;
}

using SizesOf = RecurrentSizes (*)(const DiptychRecurrent &);

// By DiptychRecurrence; null: not computed. Their bodies: recurrent.h.
constexpr SizesOf kSizes[] = {nullptr, short_conv_sizes, nullptr, nullptr, nullptr};
constexpr int32_t kKinds = sizeof kSizes / sizeof *kSizes;

template <class Numbers>
int64_t sum(const Numbers &numbers) {
    return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

}  // namespace

int64_t RecurrentSizes::state_numbers() const { return sum(states); }
int64_t RecurrentSizes::in_width() const { return sum(in); }
int64_t RecurrentSizes::side_width() const { return sum(side); }

RecurrentSizes recurrent_sizes(const DiptychRecurrent &own) { return kSizes[own.kind](own); }

std::string refused_recurrence(const DiptychRecurrent &own) {
    if (own.kind == DIPTYCH_NOT_RECURRENT) return "";
    if (own.kind < 0 || own.kind >= kKinds || kSizes[own.kind] == nullptr) return "no such recurrence";
    constexpr int32_t limit = 1 << 20;
    for (int32_t size : {own.channels, own.groups, own.heads, own.state, own.width, own.rank}) {
        if (size < 0 || size > limit) return "a recurrence has sizes that there are not";
    }
    if (own.taps < 1 || own.taps > kMostTaps) return "a convolution sees 1 to 16 tokens";
    if (own.place < kPageUnit || own.place % kPageUnit != 0) return "states do not lie in a page";
    RecurrentSizes sizes = recurrent_sizes(own);
    bool empty = sizes.in_width() < 1 || sizes.width < 1;
    return empty || sizes.in_width() > 1 << 24 ? "a recurrence has sizes that there are not" : "";
}

bool whole_recurrence(const Layer &layer) {
    const Recurrence &of = layer.recurrent;
    if (!layer.is_recurrent()) return true;
    RecurrentSizes sizes = recurrent_sizes(layer.own.recurrent);
    if (!of.in.data || !of.out.data || (!sizes.side.empty() && !of.side.data)) return false;
    if ((sizes.inner_rows > 0 && !of.inner.data) || (sizes.steps_rows > 0 && !of.steps.data)) return false;
    for (int32_t which = DIPTYCH_FILTER; which <= DIPTYCH_C_NORM; which++) {
        bool needed = which != DIPTYCH_FILTER_BIAS && sizes.vector(which) > 0;
        if (needed && of.vector(which) == nullptr) return false;
    }
    return true;
}

int64_t side_begin(const Layer &layer) { return round_up(layer.recurrent.in.out, kColumns); }

int64_t page_bytes(const DiptychModel &model) {
    int64_t end = 0;
    for (const Layer &layer : model.layers) {
        if (!layer.is_recurrent()) continue;
        int64_t numbers = recurrent_sizes(layer.own.recurrent).state_numbers();
        end = std::max(end, layer.own.recurrent.place + numbers * static_cast<int64_t>(sizeof(float)));
    }
    return round_up(end, kPageUnit);
}

}  // namespace diptych
