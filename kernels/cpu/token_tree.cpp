#include "token_tree.h"

#include <algorithm>

namespace diptych {

std::string refused_tree(const DiptychBatch &batch, int32_t s, int64_t first) {
    if (batch.parents == nullptr) return "";
    const int32_t *parents = batch.parents + first;
    for (int32_t i = 0; i < batch.counts[s]; i++) {
        if (parents[i] < -1 || parents[i] >= i) {
            return "sequence " + std::to_string(s) + ": token " + std::to_string(i) + " follows token " +
                   std::to_string(parents[i]) + " of the step";
        }
    }
    return "";
}

bool lay_tree(StepState &step, int32_t s, int32_t first) {
    if (step.batch.parents == nullptr) return false;
    const int32_t *parents = step.batch.parents + first;
    int32_t start = step.batch.starts[s], size = step.batch.block_size, longest = 0;
    bool tree = false;
    for (int32_t i = 0; i < step.batch.counts[s]; i++) {
        Row &row = step.rows[static_cast<size_t>(first + i)];
        row.position = parents[i] < 0 ? start : step.rows[static_cast<size_t>(first + parents[i])].position + 1;
        if (step.batch.turns == nullptr) row.turn = row.position;
        if (step.batch.ends == nullptr) row.end = row.position + 1;
        bool chain = row.position == row.lane;  // then each ancestor lies in the lane of its position, too
        tree = tree || !chain;
        if (chain) continue;
        int32_t length = row.position - start + 1;
        row.path = static_cast<int32_t>(step.paths.size());
        step.paths.resize(step.paths.size() + static_cast<size_t>(length));
        for (int32_t at = i, depth = length - 1; depth >= 0; depth--, at = parents[at]) {
            step.paths[static_cast<size_t>(row.path + depth)] = start + at;
        }
        longest = std::max(longest, row.position / size - start / size + 1);
    }
    // An element takes a float at most.
    int64_t floats = 2 * static_cast<int64_t>(longest) * step.head_elements();
    step.tree_floats = std::max(step.tree_floats, round_up(floats, 16));
    return tree;
}

}  // namespace diptych
