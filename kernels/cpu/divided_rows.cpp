#include "divided_rows.h"

#include <algorithm>

#include "model_share.h"

namespace diptych {

namespace {

// The rows of a rank: those of its number among as many equal shares as there are ranks.
int64_t first_row(const StepState &step, int64_t rank) {
    return static_cast<int64_t>(step.rows.size()) * rank / step.model->share->ranks;
}

}  // namespace

PlaceRange own_places(const StepState &step, const RowSet &set) {
    if (!step.divided) return {0, set.size()};
    int32_t rank = step.model->share->rank;
    auto place = [&](int64_t row) {
        return std::lower_bound(set.rows.begin(), set.rows.end(), static_cast<int32_t>(row)) - set.rows.begin();
    };
    return {place(first_row(step, rank)), place(first_row(step, rank + 1))};
}

bool is_own_row(const StepState &step, int64_t row) {
    if (!step.divided) return true;
    int32_t rank = step.model->share->rank;
    return row >= first_row(step, rank) && row < first_row(step, rank + 1);
}

void place_inputs(StepState &step) {
    const ModelShare *share = step.model->share.get();
    auto rows = static_cast<int64_t>(step.rows.size());
    // Streams that leave a stage are whole in every rank, and so are those that are tapped.
    bool whole = step.batch.leaves != nullptr || step.batch.taps > 0;
    bool many = share != nullptr && share->ranks > 1 && rows >= kDividedRows && !whole;
    step.divided = many && rows <= share->exchange.most_inputs();
    step.normed = step.divided ? share->exchange.inputs(0) : step.own_normed.get();
    step.normed_entries = step.divided ? share->exchange.inputs(1) : step.entries.get();
    bool wide = step.experts.own_normed != nullptr;
    step.experts.normed = static_cast<float *>(step.divided && wide ? share->exchange.inputs(2) : step.experts.own_normed.get());
}

}  // namespace diptych
