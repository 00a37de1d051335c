// Lays the blocks of a GGUF file out in the order in which the kernels read them. No number is changed.
//
// Blocks in the file (ggml-common.h of github.com/ggml-org/ggml): fp16 scale, for Q4_1 an fp16 least value, for MXFP4
// the power of two of its scale plus 127 in a byte; then 32 values: bytes for Q8_0; for the others 16 bytes, whose low
// halves are the first 16 values.
#include "blocks.h"
#include "pack.h"

namespace diptych {

namespace {

constexpr int64_t file_bytes(int32_t format) {
    return format == DIPTYCH_Q8_0 ? 34 : format == DIPTYCH_Q4_1 ? 20 : format == DIPTYCH_MXFP4 ? 17 : 18;
}

// Half of 2^(power - 127) as bf16, for the table has twice the numbers; the least two are subnormal.
uint16_t power_to_scale(uint8_t power) {
    return static_cast<uint16_t>(power < 2 ? 0x20 << power : (power - 1) << 7);
}

void place_values(const uint8_t *from, int32_t format, uint8_t *line_of_column) {
    for (int k = 0; k < kGroup; k++) {
        if (format == DIPTYCH_Q8_0) {
            line_of_column[k / 4 * kNextLine + k % 4] = from[k] ^ 0x80u;  // -128 .. 127 becomes 0 .. 255
            continue;
        }
        uint8_t value = k < 16 ? from[k] & 0x0fu : static_cast<uint8_t>(from[k - 16] >> 4);
        uint8_t &to = line_of_column[k / 8 * kNextLine + k % 4];
        to = static_cast<uint8_t>(to | (k % 8 < 4 ? value : value << 4));
    }
}

// `row` of the file into `column` of its packed matrix.
void place_row(const PackedPart &to, const uint8_t *row, int64_t column) {
    auto *block = static_cast<uint8_t *>(to.block(column / kColumns));
    int64_t strip = column % kColumns / kStrip, lane = column % kStrip;
    for (int64_t g = 0; g < to.depth / kGroup; g++, row += file_bytes(to.format), block += group_bytes(to.format)) {
        GroupOfStrip group = strip_of(block, to.format, strip);
        auto *scale = const_cast<uint16_t *>(group.scales) + lane;
        const uint8_t *values = row + 2;
        if (to.format == DIPTYCH_MXFP4) {
            *scale = power_to_scale(*row);
            values = row + 1;
        } else {
            std::memcpy(scale, row, 2);
        }
        if (to.format == DIPTYCH_Q4_1) {
            std::memcpy(const_cast<uint16_t *>(group.least) + lane, values, 2);
            values += 2;
        }
        place_values(values, to.format, const_cast<uint8_t *>(group.lines) + lane * 4);
    }
}

}  // namespace

int64_t packed_block_bytes(int32_t format, int64_t depth) { return depth / kGroup * group_bytes(format); }

void pack_blocks(const PackedPart &to, const DiptychMatrix &part, const ColumnOf &column) {
    int64_t row_bytes = to.depth / kGroup * file_bytes(to.format);
    const auto *from = static_cast<const uint8_t *>(part.data);
    for (int64_t row = 0; row < part.rows; row++) place_row(to, from + row * row_bytes, column(row));
}

}  // namespace diptych
