// Rows of the embedding: of a table, or of the packed head, whose column they are, where the two have the same numbers.
#pragma once

#include <cstdint>

struct DiptychModel;

namespace diptych {

// Writes the embedding of `token` [hidden], before its scale.
void read_embedding(const DiptychModel &model, int32_t token, float *to);

// Writes it scaled.
void embed_token(const DiptychModel &model, int32_t token, float *to);

// Whether the head has the very numbers of the table that is set.
bool head_has_embedding(const DiptychModel &model);

}  // namespace diptych
