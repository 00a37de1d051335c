// Groups of ranks and the rows of a step that each computes: with many rows each rank has its own, in all phases.
//
// Phases that are split by columns need whole rows in the next one, so that half of what a core reads another one wrote.
// Where cores have no cache in common (the two of a virtual machine may lie on different dies, and move) that doubled the
// time of all that is not a product. All ranks read all weights that way: with so many rows a step waits for arithmetic,
// and not for them.
#pragma once

#include <algorithm>

#include "step_state.h"

namespace diptych {
namespace {

// Rows from which on there are groups, and of each at least.
constexpr int kManyRows = 64;
constexpr int kGroupRows = 48;

// `rows` rows cut into groups of neighbours at multiples of `unit`.
struct RowGroups {
    int count = 1;

    RowGroups(const StepState &step, int64_t rows, int unit) {
        if (rows >= kManyRows) {
            int64_t most = std::min<int64_t>(step.model->team.ranks(), ThreadTeam::Tickets::kMostGroups);
            count = static_cast<int>(std::max<int64_t>(1, std::min(most, rows / kGroupRows)));
        }
        for (int group = 1; group < count; group++) ends_[group - 1] = (rows * group / count + unit / 2) / unit * unit;
        ends_[count - 1] = rows;
    }

    int64_t begin(int group) const { return group == 0 ? 0 : ends_[group - 1]; }
    int64_t end(int group) const { return ends_[group]; }

    // The tickets of a phase: a group has count_of(its first row, the row after its last).
    template <class Count>
    ThreadTeam::Tickets tickets(Count count_of) const {
        ThreadTeam::Tickets all;
        for (int group = 0; group < count; group++) all.add(count_of(begin(group), end(group)));
        return all;
    }

  private:
    int64_t ends_[ThreadTeam::Tickets::kMostGroups];
};

// Calls f(i) for this rank's share of the rows, `chunk` of a group at a time.
template <class F>
void share_rows(StepState &step, const RowGroups &groups, int64_t chunk, F f) {
    ThreadTeam &team = step.model->team;
    auto tickets = groups.tickets([&](int64_t begin, int64_t end) { return (end - begin + chunk - 1) / chunk; });
    for (auto run = team.take_run(tickets, 1); run.begin < run.end; run = team.take_run(tickets, 1)) {
        int64_t begin = groups.begin(run.group) + (run.begin - tickets.begin(run.group)) * chunk;
        int64_t end = std::min(begin + chunk, groups.end(run.group));
        for (int64_t i = begin; i < end; i++) f(i);
    }
}

// The first tile that begins at `row` or after it.
inline int64_t first_tile(const std::vector<RowTile> &tiles, int64_t row) {
    auto before = [](const RowTile &tile, int64_t border) { return tile.first < border; };
    return std::lower_bound(tiles.begin(), tiles.end(), row, before) - tiles.begin();
}

}  // namespace
}  // namespace diptych
