// Steps of many rows in a group: each rank norms some of the rows for all of them.
//
//   add the parts of own rows, norm and round them | meet | products of all rows
//
// What a rank would otherwise do for every row, and all ranks alike, it does for its share, and writes what products read
// into memory that all ranks map (sequence parallelism, Korthikanti et al. 2022). A row's numbers are the same whoever
// makes them. The residual stream of a row is kept by its rank alone. One meeting more a sublayer: it pays from some dozens
// of rows on.
//
// The next norm writes where these rows lie only after the ranks have met again, with the sums of the products that read
// them.
#pragma once

#include "step_state.h"

namespace diptych {

// Rows from which on a step is divided.
constexpr int64_t kDividedRows = 64;

// Neighbouring places of a set.
struct PlaceRange {
    int64_t begin, end;

    int64_t count() const { return end - begin; }
};

// Those whose rows this rank norms.
PlaceRange own_places(const StepState &step, const RowSet &set);

// Whether this rank norms a row.
bool is_own_row(const StepState &step, int64_t row);

// Decides whether the step is divided, and so where its normed rows lie.
void place_inputs(StepState &step);

}  // namespace diptych
