// The parts of a model by their numbers in the C interface, and what each has to look like.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model.h"

namespace diptych {

// Null: there is no such matrix, or vector.
Linear *find_linear(DiptychModel &model, int32_t layer, int32_t which);
Linear *find_expert(DiptychModel &model, int32_t layer, int32_t expert, int32_t which);
std::vector<float> *find_vector(DiptychModel &model, int32_t layer, int32_t which);

// Empty if a matrix of a layer may consist of these parts; else what is wrong with them. `expert`: it is one of an expert.
std::string refused_parts(const DiptychModel &model, int32_t layer, int32_t which, bool expert, const DiptychMatrix *parts,
                          int32_t count);

// Whether a matrix is kept in fp32 whatever the model's dtype.
bool in_fp32(int32_t which);

// The same for the formats of the parts alone.
std::string refused_formats(const DiptychModel &model, int32_t which, const DiptychMatrix *parts, int32_t count);

// Whether a vector of a layer may have so many numbers.
bool vector_fits(const DiptychModel &model, int32_t layer, int32_t which, int32_t size);

// Empty if a layer of the model may be so, else what is wrong with it.
std::string refused_layer(const DiptychModel &model, const DiptychLayer &own);

// Empty if a model may have this shape, else what is wrong with it. `shared`: it is a rank's, whose parts may have KV heads
// in common with those of others, so that not all have as many query heads.
std::string refused_shape(const DiptychShape &shape, bool shared);

// Empty if all parts of a model are set; else which one is not.
std::string incomplete(const DiptychModel &model);

}  // namespace diptych
