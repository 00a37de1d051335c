// A model as the step reads it: packed matrices, norms, and the memory that steps work in.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "abi.h"
#include "adapter.h"
#include "bf16.h"
#include "shared_region.h"
#include "thread_team.h"
#include "weight_memory.h"

namespace diptych {

// A packed matrix [in -> out]: blocks of kColumns output columns, each `depth` (in, padded) rows deep.
//   fp32: [block][depth][32]         one row of 32 columns after another
//   bf16: [block][depth / 2][32][2]  pairs along the depth, as vdpbf16ps and the AMX tiles take them
//   quantised blocks: [block][two strips of 16 columns], see blocks.h
//   bytes: [block][segment][depth / 4][32][4] and scales, see bytes.h
struct Linear {
    void *data = nullptr;
    float *bias = nullptr;  // [blocks * 32], or none
    int32_t in = 0, out = 0, depth = 0, blocks = 0;
    int32_t format = DIPTYCH_DENSE;
    int64_t block_bytes = 0;  // from one block to the next
    // The same bytes in codes of four bits, beside `data`, for products of few rows, which wait for memory; or none.
    void *codes = nullptr;
    int64_t code_block_bytes = 0;
    // Of quantised blocks: where neighbouring blocks of columns have the same format.
    struct Section {
        void *data;
        int64_t block_bytes;
        int32_t first_block, format;
    };
    static constexpr int32_t kMostSections = 4;
    Section sections[kMostSections];
    int32_t section_count = 0;

    const Section &section(int64_t block) const {
        int32_t s = section_count - 1;
        while (s > 0 && sections[s].first_block > block) s--;
        return sections[s];
    }

    const void *block(int64_t i) const { return static_cast<const char *>(data) + i * block_bytes; }
    const void *code_block(int64_t i) const { return static_cast<const char *>(codes) + i * code_block_bytes; }
};

struct Expert {
    Linear gate_up, down;
};

// Numbers of the vectors of a recurrence.
constexpr int32_t kRecurrentVectors = DIPTYCH_C_NORM - DIPTYCH_FILTER + 1;

// The recurrence of a layer (recurrent_kinds.h).
struct Recurrence {
    Linear in, side, inner, steps, out;
    std::vector<float> vectors[kRecurrentVectors];

    // Null: it has none.
    const float *vector(int32_t which) const {
        const std::vector<float> &found = vectors[which - DIPTYCH_FILTER];
        return found.empty() ? nullptr : found.data();
    }
};

struct Layer {
    Linear qkv, output, gate_up, down;
    std::vector<float> input_norm, post_norm, query_norm, key_norm;
    std::vector<float> attention_output_norm, feed_forward_output_norm;
    std::vector<float> sinks;
    Linear router, shared_gate_up, shared_down;
    std::vector<float> router_correction;
    std::vector<Expert> experts;  // none: the feed-forward is dense
    Recurrence recurrent;
    DiptychLayer own{};

    bool is_recurrent() const { return own.recurrent.kind != DIPTYCH_NOT_RECURRENT; }
};

struct ModelShare;
struct StepState;
class StepQueue;

// What one instruction set offers: the body that every rank of a step runs.
struct Kernels {
    const char *name;
    // By DiptychDtype; null where another set of the same machine computes it.
    void (*body[4])(void *step, int rank);
    bool bf16_activations;  // of the bf16 body: how it stores the inputs of its matrices; fp32 otherwise
    bool reads_codes;       // of the body of bytes: whether it makes use of codes
};

// Instruction sets of this build that this machine runs and that compute `dtype`, best first.
std::vector<const Kernels *> runnable(int32_t dtype);

// A column of gate and its column of up sit 16 apart in one block of 32.
constexpr int kGateColumns = kColumns / 2;

// `codes`: where to keep the codes of a matrix that comes in codes, too; null: nowhere.
void pack(Linear &to, WeightMemory &memory, const DiptychMatrix *parts, int32_t count, bool interleaved, int32_t dtype,
          WeightMemory *codes);

}  // namespace diptych

struct DiptychModel {
    DiptychShape shape;
    const diptych::Kernels *kernels;
    diptych::SharedRegion region;  // of packed weights that other processes map, or none
    // Codes apart: a step reads them or the bytes, from one matrix on to the next.
    diptych::WeightMemory memory, codes;
    std::vector<diptych::Layer> layers;
    diptych::Linear head;
    std::vector<float> final_norm;
    const void *embedding = nullptr;
    const void *own_embedding = nullptr;  // the table beside the shared weights, or none
    bool embeds_from_head = false;  // while there is no table: rows are read out of the packed head
    std::vector<DiptychRotation> rotations;
    int32_t positions = 0;  // that all of them reach
    std::array<const DiptychAdapter *, 256> adapters{};  // by slot
    std::vector<int32_t> head_ends;     // of each KV head: the query heads up to the last that reads it
    std::vector<int64_t> mixed_places;  // of each query head: where its values lie in a row of StepState::mixed
    int32_t block_kv_heads = 0;         // KV heads in a block, of which this model may have some
    std::unique_ptr<diptych::ModelShare, void (*)(diptych::ModelShare *)> share{nullptr, nullptr};  // or it is whole
    diptych::ThreadTeam team;
    std::unique_ptr<diptych::StepState, void (*)(diptych::StepState *)> step{nullptr, nullptr};
    // Last: when it goes it waits for its steps, while all that they need is still there.
    std::unique_ptr<diptych::StepQueue, void (*)(diptych::StepQueue *)> step_queue{nullptr, nullptr};

    bool bf16_activations() const { return shape.dtype == DIPTYCH_BF16 && kernels->bf16_activations; }
    int32_t first_head(int32_t kv_head) const { return kv_head == 0 ? 0 : head_ends[static_cast<size_t>(kv_head - 1)]; }
    // Query heads that read a KV head.
    int32_t group(int32_t kv_head) const { return head_ends[static_cast<size_t>(kv_head)] - first_head(kv_head); }
    int32_t query_width() const { return shape.heads * shape.head_dim; }
    int32_t kv_width() const { return shape.kv_heads * shape.head_dim; }
    // Of a row of queries, keys, values and gates.
    int32_t qkv_width() const { return query_width() * (shape.attention_gate ? 2 : 1) + 2 * kv_width(); }
    bool has_experts() const { return shape.experts.count > 0; }
};
