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

// What a convolution has, and states behind it.
void add_convolved(RecurrentSizes &sizes, const DiptychRecurrent &own, int64_t behind) {
    int64_t channels = own.channels;
    sizes.states = {(own.taps - 1) * channels, behind};
    sizes.vector(DIPTYCH_FILTER) = own.taps * channels;
    sizes.vector(DIPTYCH_FILTER_BIAS) = channels;
}

RecurrentSizes gated_delta_sizes(const DiptychRecurrent &own) {
    RecurrentSizes sizes;
    int32_t keys = own.groups * own.state, values = own.heads * own.width;
    if (own.apart) sizes.in = {keys, keys, values, values};
    else sizes.in = {own.channels, values};
    sizes.side = {own.heads, own.heads};
    sizes.width = values;
    add_convolved(sizes, own, int64_t{values} * own.state);
    sizes.vector(DIPTYCH_DECAY) = sizes.vector(DIPTYCH_STEP_BIAS) = own.heads;
    sizes.vector(DIPTYCH_RECURRENT_NORM) = own.width;
    return sizes;
}

RecurrentSizes mamba2_sizes(const DiptychRecurrent &own) {
    RecurrentSizes sizes;
    sizes.width = own.heads * own.width;
    sizes.in = {sizes.width + own.channels + own.heads};
    add_convolved(sizes, own, int64_t{sizes.width} * own.state);
    sizes.vector(DIPTYCH_DECAY) = sizes.vector(DIPTYCH_STEP_BIAS) = sizes.vector(DIPTYCH_SKIP) = own.heads;
    sizes.vector(DIPTYCH_RECURRENT_NORM) = own.norm == 0 ? 0 : sizes.width;
    return sizes;
}

RecurrentSizes mamba_sizes(const DiptychRecurrent &own) {
    RecurrentSizes sizes;
    sizes.width = own.width;
    sizes.in = {2 * own.width};
    sizes.inner_rows = own.rank + 2 * own.state;
    sizes.inner_columns = sizes.steps_rows = own.width;
    sizes.steps_columns = own.rank;
    sizes.scratch = scan_scratch(own).end;
    add_convolved(sizes, own, int64_t{own.width} * own.state);
    sizes.vector(DIPTYCH_DECAY) = int64_t{own.width} * own.state;
    sizes.vector(DIPTYCH_STEP_BIAS) = sizes.vector(DIPTYCH_SKIP) = own.width;
    sizes.vector(DIPTYCH_STEP_NORM) = own.rank;
    sizes.vector(DIPTYCH_B_NORM) = sizes.vector(DIPTYCH_C_NORM) = own.state;
    return sizes;
}

// Whether a kind's sizes fit each other.
bool sizes_fit(const DiptychRecurrent &own) {
    int64_t keys = int64_t{own.groups} * own.state, values = int64_t{own.heads} * own.width;
    if (keys > 1 << 24 || values > 1 << 24) return false;
    bool heads = own.groups > 0 && own.heads > 0 && own.heads % own.groups == 0 && own.state > 0 && own.width > 0;
    switch (own.kind) {
        case DIPTYCH_GATED_DELTA: return heads && own.channels == 2 * keys + values;
        case DIPTYCH_MAMBA2: return heads && own.norm >= 0 && own.norm <= 2 && own.channels == values + 2 * keys;
        case DIPTYCH_MAMBA:
            return own.channels == own.width && own.width > 0 && own.rank > 0 && own.state > 0 &&
                   own.state <= kMostScanNumbers;
        default: return true;
    }
}

using SizesOf = RecurrentSizes (*)(const DiptychRecurrent &);

// By DiptychRecurrence; null: not computed. Their bodies: recurrent.h.
constexpr SizesOf kSizes[] = {nullptr, short_conv_sizes, gated_delta_sizes, mamba2_sizes, mamba_sizes};
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
    if (!sizes_fit(own)) return "a recurrence has sizes that do not fit each other";
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

ScanScratch scan_scratch(const DiptychRecurrent &own) {
    int64_t width = round_up(own.width, kDepth);
    ScanScratch scratch;
    scratch.read = width;
    scratch.rank = scratch.read + round_up(own.rank + 2 * int64_t{own.state}, kColumns);
    scratch.steps = scratch.rank + round_up(own.rank, kDepth);
    scratch.end = scratch.steps + width;
    return scratch;
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
