// The kinds of recurrences: what each has of matrices, vectors and states, by the sizes of a layer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model.h"

namespace diptych {

// What a token has in a recurrence, and a layer for it.
struct RecurrentSizes {
    // Rows of the parts of two matrices that read the layer's input: of DIPTYCH_RECURRENT_IN, and of
    // DIPTYCH_RECURRENT_SIDE, which may have none.
    std::vector<int32_t> in, side;
    // Of two matrices within the recurrence; 0: there is none.
    int32_t inner_rows = 0, inner_columns = 0, steps_rows = 0, steps_columns = 0;
    int32_t width = 0;            // of what it gives: the columns of DIPTYCH_RECURRENT_OUT
    std::vector<int64_t> states;  // numbers of each tensor of a state, in the order in which they lie
    int64_t scratch = 0;          // numbers in which its body works
    int64_t vectors[kRecurrentVectors] = {};  // numbers of each; 0: it has none

    int64_t &vector(int32_t which) { return vectors[which - DIPTYCH_FILTER]; }
    int64_t state_numbers() const;
    int64_t in_width() const;
    int64_t side_width() const;
};

// Tokens that a convolution sees, at most.
constexpr int32_t kMostTaps = 16;

// Numbers of a channel's state in a scan, at most.
constexpr int32_t kMostScanNumbers = 256;

// Where a layer of Mamba has its numbers in a row in which it works: the input of its first product comes first. Inputs of
// products take up to four bytes a number.
struct ScanScratch {
    int64_t read, rank, steps, end;
};

ScanScratch scan_scratch(const DiptychRecurrent &own);

// Those of a layer, which was not refused.
RecurrentSizes recurrent_sizes(const DiptychRecurrent &own);

// Empty if a layer can have this recurrence, or has none; else what is wrong with it.
std::string refused_recurrence(const DiptychRecurrent &own);

// Whether all matrices and vectors of a layer's recurrence are set. Biases may be missing.
bool whole_recurrence(const Layer &layer);

// Bytes of a page with the states of all layers; 0: no layer is recurrent.
int64_t page_bytes(const DiptychModel &model);

}  // namespace diptych
