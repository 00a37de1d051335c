// Products with 8-bit weights in segments in plain C++, for machines without byte products of their own.
#pragma once

#include "bytes.h"
#include "gemm.h"

namespace diptych {
namespace {

constexpr int kByteRows = 1;

// out[Rows][32] += one segment of a panel of activations times its weights; = of the First one.
template <int Rows, bool First>
inline void add_segment(const Segment *x, const uint8_t *weight, int lines, const float *scales, float *out) {
    auto dot_line = [weight](int at, const int8_t *four, int column) {
        const uint8_t *of_column = weight + at + kFour * column;
        int32_t dot = 0;
        for (int i = 0; i < kFour; i++) dot += (of_column[i] - 128) * four[i];
        return dot;
    };
    for (int m = 0; m < Rows; m++) {
        for (int c = 0; c < kColumns; c++) {
            int32_t dot = 0;
            for (int n = 0; n < kOutliers; n++) dot += 256 * dot_line(x[m].outliers[n], x[m].high[n], c);
            for (int line = 0; line < lines; line++) dot += dot_line(line * kLineBytes, x[m].values + kFour * line, c);
            float &to = out[m * kColumns + c];
            to = static_cast<float>(dot) * (scales[c] * x[m].scale) + (First ? 0.0f : to);
        }
    }
}

}  // namespace
}  // namespace diptych
