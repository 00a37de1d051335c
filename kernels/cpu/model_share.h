// The share of a model that a rank of a group computes: some parts of every layer, some rows of the vocabulary.
//
// A part is some query heads with the KV heads that they read, and some of the feed-forward's inner numbers. What a
// product gives for each of its columns does not depend on the other columns, so that those of a rank's parts are made
// together. The two products whose sums run over heads and inner numbers are made apart for each part, and all ranks add
// what all parts give in their order, in fp32: one, two or three ranks get the same bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "abi.h"
#include "model.h"
#include "part_experts.h"
#include "rank_exchange.h"

namespace diptych {

// What a part of a layer has for itself.
struct PartProducts {
    Linear output, gate_up, down;
    std::vector<Expert> experts;  // in place of a dense feed-forward
    Linear shared_gate_up, shared_down;
};

struct ModelShare {
    ModelShare(const DiptychShape &shape, const DiptychShare &share);

    int32_t ranks, rank, own_parts, vocab, first_token;
    bool first_stage, last_stage;
    std::vector<int32_t> head_ends, inner_ends;  // of own parts
    // Where a part's values begin in a row of StepState::mixed, and of inner; then the length of a row.
    std::vector<int64_t> mixed_begins, inner_begins;
    int64_t expert_width = 0, shared_width = 0;  // of a place of inner numbers, and of a row of the shared expert's
    std::vector<PartExperts> experts;            // of own parts, or none
    int32_t query_lanes, key_lanes;  // of the model, where all heads are normed together; else 0
    std::vector<int32_t> counted;    // [own_parts, 2]: KV heads whose keys a part counts
    std::vector<std::vector<PartProducts>> layers;  // [layers][own_parts]
    RankExchange exchange;

    int32_t parts() const { return ranks * own_parts; }
    int32_t part(int32_t own) const { return rank * own_parts + own; }  // its number among all
    int32_t query_heads(int32_t own) const { return end_less_begin(head_ends, own); }
    int32_t inner(int32_t own) const { return end_less_begin(inner_ends, own); }
    bool has_shared() const { return shared_width > 0; }
    bool whole(int32_t layer, const Layer &of) const;

  private:
    static int32_t end_less_begin(const std::vector<int32_t> &ends, int32_t own) {
        auto i = static_cast<size_t>(own);
        return own == 0 ? ends[0] : ends[i] - ends[i - 1];
    }
};

// Empty if a model of this shape can have this share, else what is wrong with it.
std::string refused_share(const DiptychShape &shape, const DiptychShare &share);

// Where a KV head's query heads end, and where a query head's values lie in a row of StepState::mixed.
void place_heads(DiptychModel &model, const DiptychShare &share);

// Null: there is no such matrix.
Linear *find_part_linear(DiptychModel &model, int32_t layer, int32_t part, int32_t which);

// Empty if the matrix of an own part may consist of these; `expert`: it is one of an expert.
std::string refused_part_linear(const DiptychModel &model, int32_t part, int32_t which, bool expert,
                                const DiptychMatrix *matrices, int32_t count);

// Empty if the exchange has room for a batch of so many rows.
std::string refused_by_share(const DiptychModel &model, const DiptychBatch &batch, int64_t rows);

// Leaves, in the exchange that comes, what this rank found likeliest of each row that is sampled.
void leave_peaks(StepState &step);

// Ends a step: combines the likeliest tokens of all ranks into `likeliest`, and on rank 0 copies the logits that are wanted;
// each may be null.
void take_results(const StepState &step, float *logits, int32_t *likeliest);

}  // namespace diptych
