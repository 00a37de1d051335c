// The states of recurrent layers in a step: read from pages, advanced in memory of the step's own, and written back.
//
// A sequence's states lie in pages, one a place of block_size tokens: a count of tokens, at 64 and from there on the
// states of each layer (diptych/engine/kv/state_layout.py). A token at position p reads the page of place
// (p - 1) / block_size and leaves its states in that of p / block_size. A state that takes a token in twice is another
// one. So pages are written once all layers are computed, for no sequence that is aborted, and the count says behind how
// many tokens states are: a sequence that finds another number counts as aborted itself.
//
//   read | layers, each of which advances its states | write states | write counts
#pragma once

#include <cstdint>
#include <vector>

#include "weight_memory.h"

namespace diptych {

struct StepState;
struct Layer;

// Rows of the step, of one sequence, up to the end of a place or of the sequence's tokens: what they leave goes to a page.
// Guesses behind these tokens are a run of their own.
struct PageRun {
    int64_t first, rows;
    int32_t sequence;
    int64_t place;         // of the page; -1: what they leave is kept nowhere
    int64_t count;         // tokens behind which the states are then
    char *before, *image;  // pages of the step's own: before the first row, and behind the last one; may be one
};

// Neighbouring rows of one sequence whose states are advanced one after the other.
struct StateRun {
    int64_t first, rows;
    const float *from;  // the layer's states before the first row: its tensors one after another
    float *to;          // gets those behind the last one; may be `from`
};

// What recurrent layers work in.
struct RecurrentStep {
    int64_t in_stride = 0, out_stride = 0, scratch_stride = 0;
    bool padded = false;  // layers have outputs of several widths
    Buffer in;       // fp32 [rows, in_stride]: what a layer makes of its input
    Buffer out;      // [rows, out_stride]: input of the last product
    Buffer scratch;  // fp32 [rows, scratch_stride]
    Buffer images;   // pages of the step's own
    int64_t image_bytes = 0, page = 0;  // room there; bytes of one, 0 where no layer is recurrent
    std::vector<PageRun> runs;          // those of a sequence beside each other, in order
    std::vector<int32_t> begins;        // [sequences + 1] of each sequence's runs

    float *in_row(int64_t row) const { return static_cast<float *>(in.get()) + row * in_stride; }
    float *scratch_row(int64_t row) const { return static_cast<float *>(scratch.get()) + row * scratch_stride; }
    template <class Kind>
    typename Kind::Value *out_row(int64_t row) const {
        return static_cast<typename Kind::Value *>(out.get()) + row * out_stride;
    }
};

// Where in a row of RecurrentStep::in the numbers of DIPTYCH_RECURRENT_SIDE begin.
int64_t side_begin(const Layer &layer);

}  // namespace diptych
