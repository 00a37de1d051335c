// What the parts of a rank's share have of the experts of each layer.
//
// Dealt whole, a part has some experts; else some inner numbers of every one. Routers are whole in every rank, so that all
// pick the same experts for a row. A part adds what its experts give for the row in ascending order, then the shared
// expert's; the parts are added in their order, like all others.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model.h"

namespace diptych {

struct ModelShare;

// The experts of a part, and where its numbers begin in a place of ExpertStep::inner, and in a row of shared_inner.
struct PartExperts {
    DiptychPartExperts own;
    int64_t inner_begin, shared_begin;
};

// Where the experts of all parts work; `width` and `shared_width` become those of a place and of a row.
std::vector<PartExperts> place_experts(const DiptychShare &share, int64_t &width, int64_t &shared_width);

// Empty if a model of this shape can have these parts, else what is wrong with them.
std::string refused_experts_of_parts(const DiptychShape &shape, const DiptychShare &share);

// Makes room for the experts of a layer, which has them or not.
void resize_part_experts(ModelShare &share, int32_t layer, bool experts);

// Null: the part has no such matrix of an expert, by its number in the model.
Linear *find_part_expert(DiptychModel &model, int32_t layer, int32_t part, int32_t expert, int32_t which);

}  // namespace diptych
