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

// A row of a source matrix, padded with zeros to the depth of the packed one, and its scales into their column.
void place_bytes(Linear &to, const int8_t *values, const float *scales, int64_t column) {
    int64_t lane = column % kColumns;
    auto place = [&](int s, int64_t first, int lines, uint8_t *weight, float *scale) {
        for (int line = 0; line < lines; line++) {
            uint32_t four;
            std::memcpy(&four, values + first + line * kFour, sizeof four);
            four ^= 0x80808080u;  // 128 more, byte by byte
            std::memcpy(weight + line * kLineBytes + lane * kFour, &four, sizeof four);
        }
        scale[lane] = scales[s];
    };
    for_segments(block_of(to.data, to.block_bytes, column), DIPTYCH_I8, to.depth, place);
}

// A row of a matrix in codes, as kernels/byte_codes.py has them.
struct CodedRow {
    const uint8_t *codes;
    const int16_t *slopes;  // and intercepts, in turn

    const uint8_t *codes_of(int64_t group) const { return codes + group * kLaneCodes; }
    uint16_t slope(int64_t group) const { return static_cast<uint16_t>(slopes[2 * group]); }
    uint16_t intercept(int64_t group) const { return static_cast<uint16_t>(slopes[2 * group + 1]); }

    void read(int64_t group, int8_t *bytes) const {
        const uint8_t *both = codes_of(group);
        uint16_t slope_of = slope(group), more = intercept(group);
        for (int i = 0; i < kLaneCodes; i++) {
            bytes[i] = static_cast<int8_t>(static_cast<uint16_t>((both[i] & 15u) * slope_of + more) >> 8);
            bytes[kLaneCodes + i] = static_cast<int8_t>(static_cast<uint16_t>((both[i] >> 4u) * slope_of + more) >> 8);
        }
    }
};

// The places of two codes in a table that has code and code + 8 beside each other.
uint8_t places_of(uint8_t codes) {
    return static_cast<uint8_t>((codes << 1 & 0xeeu) | (codes >> 3 & 0x11u));
}

// One group of a row into its column of a packed one.
void place_group(const CodedRow &row, int64_t group, int64_t column, uint8_t *to) {
    int four = four_of(column), lane = lane_of(column);
    const uint8_t *codes = row.codes_of(group);
    uint8_t *place = to + codes_at(four) + lane * kLaneCodes;
    for (int i = 0; i < kLaneCodes; i++) place[i] = places_of(codes[i]);
    uint16_t line[2] = {row.slope(group), static_cast<uint16_t>(row.intercept(group) ^ 0x8000u)};
    std::memcpy(to + slopes_at(four) + lane * static_cast<int>(sizeof line), line, sizeof line);
}

void place_codes(Linear &to, const CodedRow &row, const float *scales, int64_t column) {
    int64_t lane = column % kColumns;
    auto place = [&](int s, int64_t first, int lines, uint8_t *weight, float *scale) {
        for (int64_t g = first / kDepth; g < first / kDepth + lines / kCodedLines; g++, weight += kCodedBytes) {
            place_group(row, g, lane, weight);
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
    std::vector<int8_t> values(static_cast<size_t>(to.depth));
    for (int64_t row = 0; row < part.rows; row++) {
        const float *scales = part.scales + row * segments;
        if (part.format == DIPTYCH_I8_CODED) {
            CodedRow coded = {static_cast<const uint8_t *>(part.data) + row * groups * kLaneCodes,
                              part.slopes + row * groups * 2};
            for (int64_t g = 0; g < groups; g++) coded.read(g, values.data() + g * kDepth);
            if (to.codes != nullptr) place_codes(to, coded, scales, column(row));
        } else {
            const auto *from = static_cast<const int8_t *>(part.data) + row * to.in;
            if (std::memchr(from, -128, static_cast<size_t>(to.in)) != nullptr) {
                throw std::invalid_argument("a matrix of bytes holds -128; -127 is the least");
            }
            std::memcpy(values.data(), from, static_cast<size_t>(to.in));
        }
        place_bytes(to, values.data(), scales, column(row));
    }
}

}  // namespace diptych
