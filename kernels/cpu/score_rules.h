// What becomes of attention's scores before the softmax: a soft cap, and logits of the heads beside them.
#pragma once

#include <limits>

#include "step_state.h"
#include "vector_math.h"

namespace diptych {
namespace {

struct ScoreRules {
    float cap = 0.0f;    // c: a score s becomes c tanh(s / c); 0: it stays
    bool sinks = false;  // whether each pair has a logit beside its scores
    float sink[kPairs];

    bool any() const { return cap > 0.0f || sinks; }

    // To scores[registers][pair][lane] and the greatest of each pair. `begin`: what the sums of the softmax begin with.
    // The two arrays do not leave here: kept in memory they would cost models without rules some time.
    template <int Pairs>
    void apply_to(float *scores, int64_t registers, float (&greatest)[Pairs], float (&begin)[Pairs]) const {
        float top[Pairs], first[Pairs] = {};
        for (int p = 0; p < Pairs; p++) top[p] = greatest[p];
        apply(Pairs, scores, registers, top, first);
        for (int p = 0; p < Pairs; p++) greatest[p] = top[p], begin[p] = first[p];
    }

  private:
    // Apart from where scores are made, so that other models do not pay: capping keeps their order.
    [[gnu::noinline]] void apply(int pairs, float *scores, int64_t registers, float *greatest, float *begin) const {
        float one[kLanes];
        if (cap > 0.0f) {
            for (int64_t i = 0; i < registers * pairs; i++, scores += kLanes) store(scores, capped(load(scores)));
        }
        for (int p = 0; p < pairs; p++) {
            if (cap > 0.0f) {
                store(one, capped(splat(greatest[p])));
                greatest[p] = one[0];
            }
            if (!sinks) continue;
            if (sink[p] > greatest[p]) greatest[p] = sink[p];
            store(one, exp(splat(sink[p] - greatest[p])));
            begin[p] = one[0];
        }
    }

    // What is hidden stays hidden.
    Lanes capped(Lanes score) const {
        return where_below(score, std::numeric_limits<float>::lowest(), score, soft_cap(score, cap));
    }
};

}  // namespace
}  // namespace diptych
