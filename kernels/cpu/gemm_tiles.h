// bf16 products in AMX tiles: on Sapphire Rapids some thirty times the rate of vdpbf16ps.
//
// One kernel for every number of rows, so that a row's sums never depend on how many there are: the rows of a
// tile do not touch each other.
#pragma once

#include <immintrin.h>

#include "gemm.h"

namespace diptych {
namespace {

// The operand of ldtilecfg (Intel SDM, palette 1).
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

struct TiledBf16 : AnyKind {
    using Value = bf16;
    using Input = bf16;
    using Stored = bf16;
    static constexpr int kRows = 32;
    static constexpr bool kEven = false;

    // Before a product of `rows` rows. Of few rows no tile has more than these, which spares loading padding;
    // of more than 32 the last rows come with padding, whose sums are not read.
    static void begin(int rows) {
        uint8_t upper = static_cast<uint8_t>(rows < 16 ? rows : 16);
        uint8_t lower = static_cast<uint8_t>(rows > 16 && rows < 32 ? rows - 16 : 16);
        TileShapes shapes;
        for (int i : {0, 1, 4}) shapes.rows[i] = upper;
        for (int i : {2, 3, 5}) shapes.rows[i] = lower;
        for (int i : {6, 7}) shapes.rows[i] = 16;
        for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64;
        _tile_loadconfig(&shapes);
    }
    static void end() { _tile_release(); }
    static int64_t input_bytes(int64_t depth) { return depth * static_cast<int64_t>(sizeof(Input)); }

    // Tiles 0 and 1: sums of the upper 16 rows, left and right 16 columns; 4: inputs; 6 and 7: weights.
    static void multiply_upper(const bf16 *input, int64_t stride, const bf16 *weight, int depth, float *out) {
        _tile_zero(0);
        _tile_zero(1);
        for (int k = 0; k < depth; k += kDepth, weight += kDepth * kColumns) {
            for (int line = 0; line < kDepth / 2; line++) fetch<8192, 2>(weight + line * 2 * kColumns);
            _tile_loadd(4, input + k, stride * sizeof(bf16));
            _tile_loadd(6, weight, 2 * kColumns * sizeof(bf16));
            _tile_loadd(7, weight + kColumns, 2 * kColumns * sizeof(bf16));
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        store_sums(out);
    }

    // The same with tiles 2, 3 and 5 for the lower 16 rows.
    static void multiply_both(const bf16 *input, int64_t stride, const bf16 *weight, int depth, float *out) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < depth; k += kDepth, weight += kDepth * kColumns) {
            _tile_loadd(4, input + k, stride * sizeof(bf16));
            _tile_loadd(6, weight, 2 * kColumns * sizeof(bf16));
            _tile_loadd(7, weight + kColumns, 2 * kColumns * sizeof(bf16));
            _tile_loadd(5, input + 16 * stride + k, stride * sizeof(bf16));
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        store_sums(out);
        _tile_stored(2, out + 16 * kColumns, kColumns * sizeof(float));
        _tile_stored(3, out + 16 * kColumns + 16, kColumns * sizeof(float));
    }

    static void store_sums(float *out) {
        _tile_stored(0, out, kColumns * sizeof(float));
        _tile_stored(1, out + 16, kColumns * sizeof(float));
    }

    static void tile(const bf16 *input, int64_t stride, int rows, const Linear &matrix, int64_t block, float *out) {
        const auto *weight = static_cast<const bf16 *>(matrix.block(block));
        if (rows <= 16) {
            multiply_upper(input, stride, weight, matrix.depth, out);
        } else {
            multiply_both(input, stride, weight, matrix.depth, out);
        }
    }
};

}  // namespace
}  // namespace diptych
