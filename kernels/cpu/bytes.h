// Matrices of 8-bit weights with long segments: along the depth at most 256 numbers share a scale, in the weights and
// in the activations, so that the sums of a segment are whole numbers and one multiplication of floats ends them.
//
// Activations have 8 bits, but for four lines of each segment, those with the greatest peaks, which have 16: a line is
// four neighbours along the depth, what a dot product of bytes takes at once. The scale goes by the widest of the
// others. Always four, so that no kernel has a branch for them.
//
// Weights are -127 .. 127 and lie in memory as u = w + 128, the unsigned operand of a dot product of bytes; what that
// adds is taken off as a whole number, -128 * (sum of the segment's activations).
#pragma once

#include <cstdint>

#include "abi.h"
#include "numbers.h"

namespace diptych {

constexpr int kSegment = 256;          // the most numbers
constexpr int kFour = 4;               // of a line
constexpr int kLines = kSegment / kFour;
constexpr int kWide = 4;               // lines with 16 bits
constexpr int kLineBytes = kFour * kColumns;  // a line of weights: four of the depth for each column of a block

// A segment of activations: scale * values, and in the wide lines scale * (values + 256 * high).
struct alignas(32) Segment {
    int8_t values[kSegment];  // -127 .. 127, in wide lines -128 .. 127
    int8_t high[kWide][kFour];
    uint16_t wide[kWide];     // where a block of columns has the weights of these lines: bytes from its first line
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

// The same in codes of four bits (kernels/byte_codes.py): in place of eight lines four rows of codes, then the 32
// columns' slopes and their intercepts, 16 bits each. Row i holds line 2i in the low halves of its bytes and line
// 2i + 1 in the high ones. u is the high byte of code * slope + intercept, modulo 2^16: intercepts are moved by the 128
// that u is above w.
constexpr int kCodedLines = 8;
constexpr int kCodeRow = kLineBytes;
constexpr int kCodedColumns = kColumns * static_cast<int>(sizeof(uint16_t));
constexpr int kSlopes = kCodedLines / 2 * kCodeRow;
constexpr int kIntercepts = kSlopes + kCodedColumns;
constexpr int kCodedBytes = kIntercepts + kCodedColumns;  // for 1,024 weights: five bits each

// Bytes of a segment's lines in memory, scales excluded.
static inline int64_t segment_bytes(int32_t format, int lines) {
    return format == DIPTYCH_I8_CODED ? static_cast<int64_t>(lines) / kCodedLines * kCodedBytes
                                      : static_cast<int64_t>(lines) * kLineBytes;
}

}  // namespace diptych
