// Lays 8-bit matrices out in the order in which the kernels read them (bytes.h).
#include <stdexcept>

#include "bytes.h"
#include "pack.h"

namespace diptych {

namespace {

// A row of a source matrix and its scales into their column of a packed block.
void place_row(Linear &to, const int8_t *values, const float *scales, int64_t column) {
    auto *weight = static_cast<uint8_t *>(to.data) + column / kColumns * to.block_bytes;
    int64_t lane = column % kColumns;
    SegmentCut cut = SegmentCut::of(to.depth);
    bool least = false;
    for (int s = 0; s < cut.count; s++) {
        int64_t first = static_cast<int64_t>(s) * cut.lines * kFour, lines = cut.lines_of(s);
        for (int64_t i = 0; i < lines * kFour && first + i < to.in; i++) {
            int8_t value = values[first + i];
            least = least || value == -128;
            weight[i / kFour * kLineBytes + lane * kFour + i % kFour] = static_cast<uint8_t>(value + 128);
        }
        weight += lines * kLineBytes;
        reinterpret_cast<float *>(weight)[lane] = scales[s];
        weight += kScaleBytes;
    }
    if (least) throw std::invalid_argument("a matrix of bytes holds -128; -127 is the least");
}

}  // namespace

int64_t byte_block_bytes(int64_t depth) {
    return depth * kColumns + SegmentCut::of(depth).count * kScaleBytes;
}

void pack_bytes(Linear &to, const DiptychMatrix &part, const ColumnOf &column) {
    const auto *values = static_cast<const int8_t *>(part.data);
    int64_t segments = SegmentCut::of(to.depth).count;
    for (int64_t row = 0; row < part.rows; row++) {
        place_row(to, values + row * to.in, part.scales + row * segments, column(row));
    }
}

}  // namespace diptych
