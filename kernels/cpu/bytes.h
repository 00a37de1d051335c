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
        static_assert(kSegment % kDepth == 0);
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

}  // namespace diptych
