// Lays weights out once, at load, in the order in which the kernels read them.
#include "model.h"

namespace diptych {

namespace {

// Copies row `column` of a source matrix into its column of a packed block.
void place_fp32(const float *row, int32_t in, float *column) {
    for (int32_t k = 0; k < in; k++) column[static_cast<int64_t>(k) * kColumns] = row[k];
}

void place_bf16(const bf16 *row, int32_t in, bf16 *column) {
    for (int32_t k = 0; k < in; k++) column[static_cast<int64_t>(k / 2) * kColumns * 2 + k % 2] = row[k];
}

// The packed column of row `row` of part `part`.
int64_t packed_column(int64_t row, int32_t part, int64_t rows_before, bool interleaved) {
    if (!interleaved) return rows_before + row;
    return row / kGateColumns * kColumns + part * kGateColumns + row % kGateColumns;
}

}  // namespace

void pack(Linear &to, WeightMemory &memory, const DiptychMatrix *parts, int32_t count, bool interleaved, int32_t dtype) {
    int64_t rows = 0;
    bool biased = false;
    for (int32_t p = 0; p < count; p++) {
        rows += interleaved ? round_up(parts[p].rows, kGateColumns) : parts[p].rows;
        biased = biased || parts[p].bias != nullptr;
    }
    to.in = parts[0].columns;
    to.out = static_cast<int32_t>(rows);
    to.depth = static_cast<int32_t>(round_up(to.in, kDepth));
    to.blocks = static_cast<int32_t>(round_up(rows, kColumns) / kColumns);
    int64_t element = dtype == DIPTYCH_BF16 ? sizeof(bf16) : sizeof(float);
    to.data = memory.take(static_cast<int64_t>(to.blocks) * kColumns * to.depth * element);
    void *bias = biased ? memory.take(static_cast<int64_t>(to.blocks) * kColumns * sizeof(float)) : nullptr;
    to.bias = static_cast<float *>(bias);
    int64_t before = 0;
    for (int32_t p = 0; p < count; p++) {
        const DiptychMatrix &part = parts[p];
        for (int64_t row = 0; row < part.rows; row++) {
            int64_t column = packed_column(row, p, before, interleaved);
            int64_t block = column / kColumns * kColumns * to.depth, lane = column % kColumns;
            if (dtype == DIPTYCH_BF16) {
                place_bf16(static_cast<const bf16 *>(part.data) + row * to.in, to.in,
                           static_cast<bf16 *>(to.data) + block + lane * 2);
            } else {
                place_fp32(static_cast<const float *>(part.data) + row * to.in, to.in,
                           static_cast<float *>(to.data) + block + lane);
            }
            if (part.bias != nullptr) to.bias[column] = part.bias[row];
        }
        before += part.rows;
    }
}

}  // namespace diptych
