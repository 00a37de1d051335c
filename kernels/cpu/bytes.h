// Matrices of 8-bit weights with long segments: along the depth at most 576 numbers share a scale, in the weights and
// in the activations, so that the sums of a segment are whole numbers and one multiplication of floats ends them.
//
// Activations have 8 bits, but for four outlier columns of each segment, which have 16: the lines with the greatest
// peaks, a line being four neighbours along the depth, what a dot product of bytes takes at once. The scale goes by the
// greatest peak of the others. Always four, so that no kernel has a branch for them.
//
// Weights are -127 .. 127 and lie in memory as u = w + 128, the unsigned operand of a dot product of bytes; what that
// adds is taken off as a whole number, -128 * (sum of the segment's activations).
#pragma once

#include <cstdint>

#include "abi.h"
#include "bf16.h"

namespace diptych {

constexpr int kSegment = 576;          // the most numbers
constexpr int kFour = 4;               // of a line
constexpr int kLines = kSegment / kFour;
constexpr int kLineBits = 255;         // that hold the number of a line
static_assert(kLines <= kLineBits + 1);
constexpr int kOutliers = 4;           // lines with 16 bits
constexpr int kLineBytes = kFour * kColumns;  // a line of weights: four of the depth for each column of a block

// A segment of activations: scale * values, and in outlier columns scale * (values + 256 * high).
struct alignas(32) Segment {
    int8_t values[kSegment];  // -127 .. 127, in outlier columns -128 .. 127
    int8_t high[kOutliers][kFour];
    uint16_t outliers[kOutliers];  // where a block of columns has these lines' weights: bytes from its first line
    float scale;              // NaN where an activation was not finite
    int32_t minus_128_sum;    // of all whole numbers
};

// How a padded depth is cut: `count` segments of `lines` lines, the last of which may have fewer.
struct SegmentCut {
    int count, lines, all_lines;

    static SegmentCut of(int64_t depth) {
        static_assert(kSegment % kDepth == 0 && kDepth == kFour * 8);
        int64_t count = (depth + kSegment - 1) / kSegment;
        int64_t width = round_up((depth + count - 1) / count, kDepth);
        return {static_cast<int>(count), static_cast<int>(width / kFour), static_cast<int>(depth / kFour)};
    }
    int lines_of(int segment) const {
        int rest = all_lines - segment * lines;
        return rest < lines ? rest : lines;
    }
};

// A block of columns in memory, aligned to 64 bytes, read from first to last: segment after segment, each its lines
// and then 32 scales in fp32.
constexpr int64_t kScaleBytes = kColumns * static_cast<int64_t>(sizeof(float));

// The same in codes of four bits (kernels/byte_codes.py), in place of eight lines: for each strip of 16 columns slopes and
// intercepts, 16 bits each, in turn, and then 16 bytes of codes a column, as a GGUF file has them. u is the high byte of
// code * slope + intercept, modulo 2^16: intercepts are moved by the 128 that u is above w. Everything lies in the order
// in which it is read: in another order a core fetches half as fast.
//
// Four columns are read together. Column 4 l + q of a strip lies in lane l of its four q: the sums come out in order that
// way. The bytes of a column are looked up in a table that has code and code + 8 beside each other: codes are stored as
// their places there.
constexpr int kCodedLines = 8;
constexpr int kLaneCodes = 16;           // bytes of a column, in 128 bits
constexpr int kFours = kColumns / kFour;
constexpr int kStripFours = kFours / 2;
constexpr int kFourCodes = kFour * kLaneCodes;
constexpr int kFourSlopes = kFour * 2 * static_cast<int>(sizeof(uint16_t));
constexpr int kStripSlopes = kStripFours * kFourSlopes;  // bytes before a strip's codes
constexpr int kCodedStrip = kStripSlopes + kStripFours * kFourCodes;
constexpr int kCodedBytes = 2 * kCodedStrip;  // for 1,024 weights: five bits each

// Where four columns have their slopes, and their codes, from the begin of a group on.
static constexpr int slopes_at(int four) {
    return four / kStripFours * kCodedStrip + four % kStripFours * kFourSlopes;
}
static constexpr int codes_at(int four) {
    return four / kStripFours * kCodedStrip + kStripSlopes + four % kStripFours * kFourCodes;
}
static inline int four_of(int64_t column) { return static_cast<int>(column / 16 * 4 + column % 4); }
static inline int lane_of(int64_t column) { return static_cast<int>(column % 16 / 4); }

// Bytes of a segment's lines in memory, scales excluded.
static inline int64_t segment_bytes(int32_t format, int lines) {
    return format == DIPTYCH_I8_CODED ? static_cast<int64_t>(lines) / kCodedLines * kCodedBytes
                                      : static_cast<int64_t>(lines) * kLineBytes;
}

}  // namespace diptych
