// The recurrences of the native step by themselves, for test_recurrences.py: one instruction set a library.
#include DIPTYCH_SIMD

#include "delta_rule.h"
#include "selective_scan.h"
#include "state_space.h"

using namespace diptych;

extern "C" {

int32_t lanes() { return kLanes; }

void softplus_of(const float *x, float *to, int32_t n) {
    by_lanes(n, [&](int i) { store(to + i, softplus(load(x + i))); },
             [&](int i, int rest) { store_part(to + i, softplus(load_part(x + i, rest)), rest); });
}

void delta(const DeltaSizes *sizes, const float *const *weights, const DeltaRows *rows, const float *from, float *to,
           float *out) {
    DeltaWeights own{weights[0], weights[1], weights[2]};
    for (int32_t head = 0; head < sizes->key_heads; head++) {
        advance_delta(*sizes, own, *rows, head, from, to, out, sizes->values());
    }
}

void space(const SpaceSizes *sizes, const float *const *weights, const SpaceRows *rows, const float *from, float *to,
           float *out) {
    SpaceWeights own{weights[0], weights[1], weights[2], weights[3]};
    for (int32_t head = 0; head < sizes->heads; head++) advance_space(*sizes, own, *rows, head, from, to);
    for (int i = 0; i < rows->count; i++) gate_space(*sizes, own, *rows, i, out + i * sizes->width());
}

void scan_channels(const ScanWeights *weights, const ScanRows *rows, const float *from, float *to, float *out) {
    scan(*weights, *rows, 0, weights->channels, from, to, out, weights->channels);
}
}
