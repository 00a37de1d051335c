// Where the rows of a matrix go, and how quantised rows are laid out.
#pragma once

#include <cstdint>

#include "model.h"

namespace diptych {

// The packed column of a row of one part of a fused matrix.
struct ColumnOf {
    int32_t part;
    int64_t rows_before;
    bool interleaved;

    int64_t operator()(int64_t row) const {
        if (!interleaved) return rows_before + row;
        return row / kGateColumns * kColumns + part * kGateColumns + row % kGateColumns;
    }
};

// Memory of neighbouring blocks of columns of one format.
struct PackedPart {
    void *data;
    int64_t first_block, block_bytes;
    int32_t depth, format;

    void *block(int64_t i) const { return static_cast<char *>(data) + (i - first_block) * block_bytes; }
};

// Bytes of kColumns columns.
int64_t packed_block_bytes(int32_t format, int64_t depth);
int64_t byte_block_bytes(int32_t format, int64_t depth);

int64_t kquant_block_bytes(int32_t format, int64_t depth);

void pack_blocks(const PackedPart &to, const DiptychMatrix &part, const ColumnOf &column);
void pack_kquants(const PackedPart &to, const DiptychMatrix &part, const ColumnOf &column);
void pack_bytes(Linear &to, const DiptychMatrix &part, const ColumnOf &column);

}  // namespace diptych
