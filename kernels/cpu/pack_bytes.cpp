// Lays 8-bit matrices out in the order in which the kernels read them (bytes.h).
#include <cstring>
#include <stdexcept>
#include <vector>

#include "bytes.h"
#include "pack.h"

namespace diptych {

namespace {

// The segments of a packed block of columns, one after another, and where a column has its scale.
template <class Place>
void for_segments(uint8_t *weight, int32_t format, int64_t depth, Place place) {
    SegmentCut cut = SegmentCut::of(depth);
    for (int s = 0; s < cut.count; s++) {
        int lines = cut.lines_of(s);
        uint8_t *scales = weight + segment_bytes(format, lines);
        place(s, static_cast<int64_t>(s) * cut.lines * kFour, lines, weight, reinterpret_cast<float *>(scales));
        weight = scales + kScaleBytes;
    }
}

uint8_t *block_of(void *data, int64_t block_bytes, int64_t column) {
    return static_cast<uint8_t *>(data) + column / kColumns * block_bytes;
}

// A row of a source matrix and its scales into their column.
void place_bytes(Linear &to, const int8_t *values, const float *scales, int64_t column) {
    int64_t lane = column % kColumns;
    bool least = false;
    auto place = [&](int s, int64_t first, int lines, uint8_t *weight, float *scale) {
        for (int64_t i = 0; i < lines * kFour && first + i < to.in; i++) {
            int8_t value = values[first + i];
            least = least || value == -128;
            weight[i / kFour * kLineBytes + lane * kFour + i % kFour] = static_cast<uint8_t>(value + 128);
        }
        scale[lane] = scales[s];
    };
    for_segments(block_of(to.data, to.block_bytes, column), DIPTYCH_I8, to.depth, place);
    if (least) throw std::invalid_argument("a matrix of bytes holds -128; -127 is the least");
}

// A row of a matrix in codes, as kernels/byte_codes.py has them.
struct CodedRow {
    const uint8_t *codes;
    const int16_t *lines;

    uint8_t code(int64_t i) const {
        constexpr int kHalf = kDepth / 2;
        int64_t within = i % kDepth;
        uint8_t both = codes[i / kDepth * kHalf + within % kHalf];
        return within < kHalf ? both & 0x0fu : static_cast<uint8_t>(both >> 4);
    }
    int32_t slope(int64_t group) const { return lines[2 * group]; }
    int32_t intercept(int64_t group) const { return lines[2 * group + 1]; }
    int8_t byte(int64_t i) const {
        int32_t sum = code(i) * slope(i / kDepth) + intercept(i / kDepth);
        return static_cast<int8_t>(static_cast<int16_t>(sum) >> 8);
    }
};

// The places of two codes in a table that has code and code + 8 beside each other.
uint8_t places_of(uint8_t codes) {
    return static_cast<uint8_t>((codes << 1 & 0xeeu) | (codes >> 3 & 0x11u));
}

// One group of a row into its column of a packed one.
void place_group(const CodedRow &row, int64_t group, int64_t column, uint8_t *to) {
    int four = four_of(column), lane = lane_of(column);
    const uint8_t *codes = row.codes + group * kLaneCodes;
    for (int i = 0; i < kLaneCodes; i++) to[codes_at(four) + lane * kLaneCodes + i] = places_of(codes[i]);
    uint16_t line[2] = {static_cast<uint16_t>(row.slope(group)), static_cast<uint16_t>(row.intercept(group) + 0x8000)};
    std::memcpy(to + slopes_at(four) + lane * static_cast<int>(sizeof line), line, sizeof line);
}

void place_codes(Linear &to, const CodedRow &row, const float *scales, int64_t column) {
    int64_t lane = column % kColumns;
    auto place = [&](int s, int64_t first, int lines, uint8_t *weight, float *scale) {
        for (int64_t g = first / kDepth; g < first / kDepth + lines / kCodedLines; g++, weight += kCodedBytes) {
            place_group(row, g, column % kColumns, weight);
        }
        scale[lane] = scales[s];
    };
    for_segments(block_of(to.codes, to.code_block_bytes, column), DIPTYCH_I8_CODED, to.depth, place);
}

}  // namespace

int64_t byte_block_bytes(int32_t format, int64_t depth) {
    return segment_bytes(format, static_cast<int>(depth / kFour)) + SegmentCut::of(depth).count * kScaleBytes;
}

void pack_bytes(Linear &to, const DiptychMatrix &part, const ColumnOf &column) {
    int64_t segments = SegmentCut::of(to.depth).count, groups = to.depth / kDepth;
    std::vector<int8_t> read(static_cast<size_t>(to.in));
    for (int64_t row = 0; row < part.rows; row++) {
        const float *scales = part.scales + row * segments;
        const int8_t *values = static_cast<const int8_t *>(part.data) + row * to.in;
        if (part.format == DIPTYCH_I8_CODED) {
            CodedRow coded = {static_cast<const uint8_t *>(part.data) + row * groups * (kDepth / 2),
                              part.lines + row * groups * 2};
            for (int64_t i = 0; i < to.in; i++) read[static_cast<size_t>(i)] = coded.byte(i);
            if (to.codes != nullptr) place_codes(to, coded, scales, column(row));
            values = read.data();
        }
        place_bytes(to, values, scales, column(row));
    }
}

}  // namespace diptych
