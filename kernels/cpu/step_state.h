// One step as all ranks see it: the sequence of each row, and the buffers between the phases.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "kv_layout.h"
#include "model.h"
#include "recurrent_step.h"
#include "topk.h"

namespace diptych {

// Queries that one attention task serves together: they share every load of keys and values.
constexpr int kPairs = 12;

// Tokens of one block whose keys and values are written together.
constexpr int kPlaceRows = 16;

struct Row {
    int32_t sequence, position, token;
    int32_t turn;  // row of the rotary tables
    int32_t end;   // the first position that it does not see
    int32_t lane;  // where its keys and values lie: in a chain that of its position
    int32_t path;  // of a row whose ancestors lie in other lanes than those of their positions (tree_attention.h); else -1
};

// Neighbouring rows of one sequence.
struct RowTile {
    int32_t first, rows;
};

// The rows that go through a part of a layer, in order. What a product reads and writes is indexed by the place in here.
struct RowSet {
    std::vector<int32_t> rows;   // of the step
    std::vector<RowTile> tiles;  // whose queries are served together; `first` is a place in here
    // Adapters by place, null where a row has none; all empty where no row has one.
    std::vector<const DiptychAdapter *> adapters;
    std::vector<int32_t> adapted;  // places of rows with adapters, those of one adapter together
    std::vector<AdapterTile> adapter_tiles;

    int64_t size() const { return static_cast<int64_t>(rows.size()); }
    int32_t row(int64_t place) const { return rows[static_cast<size_t>(place)]; }
};

// A row whose logits are computed: where these go, or the peaks of their blocks. The other one is -1.
struct WantedRow {
    int32_t row;
    int64_t logits, peaks;
};

// The rows of a step that one expert computes.
struct ExpertRows {
    int32_t expert, rows;
    int64_t begin;  // their first place
};

// What the experts of a layer work in. A row is sent to each of its experts, to a place of its own; those of one
// expert lie beside each other.
struct ExpertStep {
    int64_t router_stride = 0, inner_stride = 0, shared_stride = 0;
    float *normed = nullptr;  // fp32 [rows, hidden_stride], where the input of matrices is less
    Buffer own_normed;        // of this process alone
    Buffer logits;         // fp32 [rows, router_stride]: of the experts, then of the shared expert's gate
    Buffer gathered;       // [places, hidden_stride]: inputs, where they are not quantised
    Buffer inner;          // [places, inner_stride]
    Buffer outputs;        // fp32 [places, hidden_stride]
    Buffer shared_inner;   // [rows, shared_stride]
    Buffer entries;        // [places, entry_stride]: quantised inputs
    int64_t entry_stride = 0;
    std::vector<int32_t> picked;      // [rows, experts a row], in ascending order
    std::vector<float> weights;       // [rows, experts a row]
    std::vector<int64_t> places;      // [rows, experts a row]; -1: the expert is not here
    std::vector<ExpertRows> groups;   // [experts]; of experts with rows, and these first
    std::vector<int32_t> group_of;    // [experts]
    // Of this layer. A guest without a part in it may look at any time.
    std::atomic<int32_t> used{0};     // groups
    std::atomic<int64_t> gate_up_tickets{0}, down_tickets{0};

    float shared_gate(int64_t row, int32_t count) const {  // of a row, behind the logits of `count` experts
        return static_cast<const float *>(logits.get())[row * router_stride + count];
    }
};

struct StepState {
    DiptychModel *model = nullptr;
    DiptychBatch batch{};
    float *logits = nullptr;
    int64_t logit_stride = 0;  // from one row's to the next
    int32_t guests_from = 0;  // the layer from which on guests may help

    std::vector<Row> rows;
    RowSet all;      // of the layers
    RowSet closing;  // of the last one, once its keys and values are written: nothing reads the other rows any more
    std::vector<int32_t> paths;           // of rows in trees: lanes of the ancestors and of the row itself
    std::vector<RowTile> places;          // whose keys and values are written together
    std::vector<const int32_t *> tables;  // per sequence; after them, per table of windowed layers, again
    std::vector<WantedRow> wanted;        // in order
    std::vector<uint8_t> live;            // per sequence; written between barriers by rank 0 only
    std::atomic<bool> stopped{false};     // likewise; guests on their way through the phases look at any time

    // Leading dimensions are padded to kDepth or kColumns and the padding stays zero. Inputs of matrices are
    // bf16 where the kernels multiply bf16 pairs, else fp32.
    int64_t hidden_stride = 0, qkv_stride = 0, mixed_stride = 0, inner_stride = 0;
    Buffer hidden;  // fp32 [rows, hidden_stride], the residual stream
    Buffer qkv;     // fp32 [rows, qkv_stride]
    Buffer update;  // fp32 [rows, hidden_stride]: what a sublayer adds, where it is not added as it comes
    Buffer mixed;   // input of output: what attention gives
    Buffer inner;   // input of down
    Buffer entries;  // [rows, entry_stride] of Group or Segment: the input of the next product, where it is quantised
    int64_t entry_stride = 0;
    // The input of qkv, gate_up and head, and its quantised form: in this process' own memory, or in that of all ranks of a
    // group, each of which then norms some of the rows (divided_rows.h).
    void *normed = nullptr, *normed_entries = nullptr;
    int64_t normed_entry_stride = 0;
    Buffer own_normed;
    bool divided = false;
    int64_t row_capacity = 0;
    Buffer shrunk;  // fp32 [rows, shrunk_stride]: between the two products of adapters
    int64_t shrunk_stride = 0, shrunk_rows = 0;
    ExpertStep experts;
    RecurrentStep recurrent;

    std::vector<Buffer> scores;  // per rank, guests included: queries and probabilities of one attention task
    int64_t score_floats = 0;    // of each
    int64_t tree_floats = 0;     // and at their end, keys and values of one head along a path

    float *hidden_row(int64_t row) const { return static_cast<float *>(hidden.get()) + row * hidden_stride; }
    float *update_row(int64_t place) const { return static_cast<float *>(update.get()) + place * hidden_stride; }
    float *shrunk_row(int64_t place) const { return static_cast<float *>(shrunk.get()) + place * shrunk_stride; }
    float *qkv_row(int64_t row) const { return static_cast<float *>(qkv.get()) + row * qkv_stride; }
    bool is_live(int32_t row) const { return live[rows[row].sequence] != 0; }
    int64_t head_elements() const {  // of keys, or of values, of one head in one block
        return diptych::head_elements(batch.kept, model->shape.head_dim, batch.block_size);
    }
    // The table of a layer, by the number of a block in its sequence; of a windowed one, of those that are there.
    const int32_t *table(int32_t layer, int32_t sequence) const {
        int64_t number = batch.layer_places == nullptr ? 0 : batch.layer_places[2 * layer];
        return tables[static_cast<size_t>(number * batch.sequences + sequence)];
    }
    int64_t layer_elements(int32_t layer) const {  // from the beginning of a block to a layer's keys
        return 2 * block_elements() * (batch.layer_places == nullptr ? layer : batch.layer_places[2 * layer + 1]);
    }
    int64_t block_elements() const { return model->block_kv_heads * head_elements(); }  // of one layer
    int64_t block_stride() const {  // elements from one block to the next
        return batch.block_stride ? batch.block_stride : 2 * block_elements() * model->shape.layers;
    }

    std::vector<Peak> peaks;  // [greedy rows, blocks of the head]

    // Sees which sequences are aborted; returns whether all are.
    bool poll_aborts();
    // The likeliest token of each wanted row that is greedy and has one, for the others -1.
    void tell_likeliest(int32_t *to) const;
};

// Empty if the batch can be computed; else what is wrong with it. Reads nothing but the arrays of the batch.
std::string refusal(const DiptychModel &model, const DiptychBatch &batch, int32_t threads);

// Fills the step for a batch that was not refused. Buffers only grow. Throws std::bad_alloc.
void prepare(StepState &step, DiptychModel &model, const DiptychBatch &batch, int32_t threads, float *logits);

}  // namespace diptych
