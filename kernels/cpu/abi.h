// The C interface of the native CPU step, called from kernels/cpu/library.py through ctypes.
//
// Plain structs of fixed-width fields and nothing of Python or torch, so that one shared library serves every
// interpreter and torch version, and builds with nothing but a C++17 compiler. Change a struct or a meaning
// and DIPTYCH_ABI_VERSION moves with it: the Python side refuses another version.
#pragma once

#include <cstdint>

#define DIPTYCH_ABI_VERSION 34

#pragma GCC visibility push(default)
extern "C" {

enum DiptychDtype : int32_t {
    DIPTYCH_FP32 = 0,
    DIPTYCH_BF16 = 1,
    DIPTYCH_BLOCKS = 2,  // matrices in quantised blocks; embedding, keys and values bf16
    DIPTYCH_BYTES = 3,   // matrices in bytes with scales; the rest as in blocks
};

// How the numbers of a matrix are stored: one after another, in GGUF's blocks of 32 (the last of a row padded), as
// int8 of -127 .. 127 one after another with scales beside them, or as the same int8 in codes of four bits.
enum DiptychFormat : int32_t {
    DIPTYCH_DENSE = 0,
    DIPTYCH_Q4_0 = 1,
    DIPTYCH_Q4_1 = 2,
    DIPTYCH_Q8_0 = 3,
    DIPTYCH_I8 = 4,
    DIPTYCH_I8_CODED = 5,
    // In GGUF's blocks of 256, of which the columns are a multiple.
    DIPTYCH_Q2_K = 6,
    DIPTYCH_Q3_K = 7,
    DIPTYCH_Q4_K = 8,
    DIPTYCH_Q5_K = 9,
    DIPTYCH_Q6_K = 10,
    DIPTYCH_IQ4_XS = 11,
    // In GGUF's blocks of 32 again, whose codes are places in a table.
    DIPTYCH_IQ4_NL = 12,
    DIPTYCH_MXFP4 = 13,
};

// Numbers of keys and values in their blocks.
enum DiptychKv : int32_t {
    DIPTYCH_KV_OWN = 0,   // the model's dtype, bf16 where matrices are quantised
    DIPTYCH_KV_INT8 = 1,  // int8, each token's of a head times a scale: kernels/int8_cache.py has the arrangement
};

enum DiptychStatus : int32_t {
    DIPTYCH_OK = 0,
    DIPTYCH_ALL_ABORTED = 1,  // every sequence was aborted; no logits were computed
    DIPTYCH_INVALID = 2,      // refused before any memory of the batch was touched
    DIPTYCH_FAILED = 3,       // out of memory or threads; nothing of the batch was computed
};

// Function of the feed-forward's gate, or of its only matrix.
enum DiptychActivation : int32_t {
    DIPTYCH_SILU = 0,            // x sigmoid(x)
    DIPTYCH_GELU = 1,            // x Phi(x)
    DIPTYCH_GELU_TANH = 2,       // the same by its tanh form
    DIPTYCH_RELU_SQUARED = 3,    // max(x, 0)^2
    DIPTYCH_CLAMPED_SWIGLU = 4,  // of gate g and up u: min(g, c) sigmoid(1.702 min(g, c)) (clamp(u, -c, c) + 1)
};

// Weights of the experts that a row picks, of which the greatest are picked; of equal ones the first.
enum DiptychRouting : int32_t {
    DIPTYCH_SOFTMAX_THEN_TOPK = 0,  // the softmax over all experts
    DIPTYCH_TOPK_THEN_SOFTMAX = 1,  // over the picked alone
    DIPTYCH_SIGMOID = 2,            // a sigmoid each
};

// A feed-forward of experts. All zero: the model has none.
struct DiptychExperts {
    int32_t count, picked;        // experts, and how many of them a row picks
    int32_t intermediate;         // width of each
    int32_t shared_intermediate;  // width of the one that every row passes, or 0
    int32_t routing;              // DiptychRouting
    int32_t normalise;            // 1: the weights of the picked are divided by their sum
    float scale;                  // and multiplied with this
    int32_t groups, picked_groups;  // neighbours, and how many groups a row picks its experts of
    int32_t best_two;  // 1: a group is as good as the sum of its two best experts, else as its best
};

struct DiptychShape {
    int32_t dtype;  // DiptychDtype: of weights and of keys and values; sums are always fp32
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
    float rms_epsilon;
    float query_scale;  // of scores: mostly 1 / sqrt(head_dim)
    float embedding_scale;
    float residual_scale;  // of what a sublayer adds
    float logit_scale;
    float logit_cap, score_cap;  // c: x becomes c tanh(x / c); 0: it stays
    float growth;                // of queries at position p: 1 + growth ln(1 + floor(p / growth_length))
    int32_t growth_length;       // 0: they do not grow
    int32_t activation;          // DiptychActivation
    float clamp;                 // c of DIPTYCH_CLAMPED_SWIGLU
    int32_t gated;               // 0: no gate, the feed-forward is down(activation(up x))
    int32_t norm_after_rotation;        // 1: queries and keys are normed after their rotation
    int32_t sinks;                      // 1: each head has a logit beside its scores
    int32_t attention_gate;             // 1: what attention gives is multiplied by a sigmoid of a product of its input
    struct DiptychExperts experts;
};

// What a part has of the experts of a layer: whole ones, or some inner numbers of each.
struct DiptychPartExperts {
    int32_t first, end;           // experts first .. end - 1
    int32_t intermediate;         // inner numbers of each that are here
    int32_t shared_intermediate;  // of the one that every row passes; 0: the model has none
};

// What a rank of a group computes of a model, whose DiptychShape is that of the rank: its heads, its inner numbers, its
// tokens, and of experts what the whole model has. It has parts in a row, and every rank as many. What the output and
// down matrices of all parts give is added in the order of the parts, whatever the number of ranks (model_share.h).
struct DiptychShare {
    int32_t ranks, rank;
    int32_t own_parts;          // of this rank
    const int32_t *head_ends;   // [own_parts] of the rank's query heads, those up to a part's last
    const int32_t *inner_ends;  // [own_parts] likewise of the numbers between the two products of a feed-forward
    const int32_t *group_ends;  // [kv_heads] of the rank's query heads, those up to the last that reads a KV head
    const struct DiptychPartExperts *experts;  // [own_parts], or null where the model has none
    // Where queries and keys are normed over all heads of the model together: how many numbers these are, else 0; and
    // [own_parts, 2] the first and the end of the rank's KV heads that a part counts, so that each is counted once.
    int32_t query_lanes, key_lanes;
    const int32_t *counted;
    int32_t block_kv_heads;     // KV heads in a block; addresses of memories are those of the rank's first
    int32_t vocab, first_token;  // of the whole model; the rank's first one
    int32_t first_stage, last_stage;  // 1: its layers are the model's first, and begin with an embedding; its last, and end
                                      // with a head
    int32_t file;               // an empty file in memory that all ranks have, -1 where there is one; not closed
};

// Recurrences: what a sequence keeps of all its tokens is a state of a fixed size.
enum DiptychRecurrence : int32_t {
    DIPTYCH_NOT_RECURRENT = 0,
    DIPTYCH_SHORT_CONV = 1,   // out(C * conv(B * x)) (LFM2)
    DIPTYCH_GATED_DELTA = 2,  // a matrix a head that each token corrects (Qwen3-Next)
    DIPTYCH_MAMBA2 = 3,       // a matrix a head that each token adds to
    DIPTYCH_MAMBA = 4,        // a few numbers a channel
};

// The sizes of a layer's recurrence; a kind leaves at 0 what it does not have. All zero: the layer is not recurrent.
struct DiptychRecurrent {
    int32_t kind;      // DiptychRecurrence
    int32_t place;     // bytes from the beginning of a page to the layer's states, a multiple of 64
    int32_t channels;  // of the convolution
    int32_t taps;      // tokens that it sees, the present one included
    int32_t groups;    // key heads of the delta rule, groups of heads of Mamba-2
    int32_t heads;     // value heads of the delta rule, heads of Mamba-2
    int32_t state;     // lanes of a key of the delta rule, numbers of a channel's state of the others
    int32_t width;     // lanes of a value of the delta rule, of a head of Mamba-2; all channels of Mamba
    int32_t rank;      // of Mamba: what steps are made of
    int32_t apart;     // of the delta rule: 1: queries, keys and values have matrices of their own
    int32_t norm;      // of Mamba-2: 0 none, 1 after the gate, 2 before it
    float epsilon;     // of its norms
    float largest_rate;              // of the delta rule
    float least_step, largest_step;  // of Mamba-2
};

// What a layer has of its own.
struct DiptychLayer {
    int32_t window;    // tokens that one attends to, itself included; 0: all
    int32_t rotation;  // number of a rotary table; -1: queries and keys are not rotated
    int32_t experts;   // 1: the feed-forward is that of experts
    int32_t attention, feed_forward;    // 1: the layer attends; it has a feed-forward
    int32_t norms_before, norms_after;  // 1: a sublayer f has a norm before it, or after it, or both
    struct DiptychRecurrent recurrent;  // in place of attention, or, where it has both, beside it: the sum of both is added
};

// Which matrix of a layer. The parts of a fused one are given together, in this order.
enum DiptychLinear : int32_t {
    DIPTYCH_QKV = 0,      // q, k, v, and the gate of what attention gives, where the model has one
    DIPTYCH_OUTPUT = 1,
    DIPTYCH_GATE_UP = 2,  // gate, up: their columns are interleaved so that one tile holds both; or up alone
    DIPTYCH_DOWN = 3,
    DIPTYCH_HEAD = 4,     // of the model, the layer is ignored
    DIPTYCH_ROUTER = 5,   // dense and fp32 in all dtypes; a second part of one row gates the shared expert
    DIPTYCH_SHARED_GATE_UP = 6,
    DIPTYCH_SHARED_DOWN = 7,
    DIPTYCH_RECURRENT_IN = 8,      // all that a recurrence makes of the layer's input, up to four parts
    DIPTYCH_RECURRENT_SIDE = 9,    // and what of it is worth fp32: dense in all dtypes, up to two parts
    DIPTYCH_RECURRENT_INNER = 10,  // of Mamba: steps, what is written and what is read, of the convolved channels
    DIPTYCH_RECURRENT_STEPS = 11,  // of Mamba: the steps of all channels
    DIPTYCH_RECURRENT_OUT = 12,
};

// Vectors of a layer, fp32.
enum DiptychVector : int32_t {
    DIPTYCH_INPUT_NORM = 0,
    DIPTYCH_POST_NORM = 1,   // before the feed-forward
    DIPTYCH_QUERY_NORM = 2,  // [head_dim] for each head, or [heads * head_dim] for all of them together
    DIPTYCH_KEY_NORM = 3,    // likewise
    DIPTYCH_FINAL_NORM = 4,  // of the model, the layer is ignored
    DIPTYCH_ATTENTION_OUTPUT_NORM = 5,     // of what attention adds
    DIPTYCH_FEED_FORWARD_OUTPUT_NORM = 6,  // of what the feed-forward adds
    DIPTYCH_SINKS = 7,                     // [heads]
    DIPTYCH_ROUTER_CORRECTION = 8,         // [experts]: added for picking, not for weighing
    // Of a recurrence; which ones, and of what size: recurrent_kinds.h.
    DIPTYCH_FILTER = 9,        // [taps, channels], the oldest token's first
    DIPTYCH_FILTER_BIAS = 10,  // [channels]
    DIPTYCH_DECAY = 11,        // what steps are multiplied with, below 0
    DIPTYCH_STEP_BIAS = 12,
    DIPTYCH_SKIP = 13,
    DIPTYCH_RECURRENT_NORM = 14,
    DIPTYCH_STEP_NORM = 15,
    DIPTYCH_B_NORM = 16,
    DIPTYCH_C_NORM = 17,
};

// Cosines and sines [positions, head_dim / 2]: lane i of a head turns with lane i + head_dim / 2.
struct DiptychRotation {
    const float *cosines, *sines;
};

// Row-major [rows, columns] as torch.nn.functional.linear takes it: in the model's dtype, in blocks where that is
// DIPTYCH_BLOCKS, and in bytes where it is DIPTYCH_BYTES.
struct DiptychMatrix {
    const void *data;
    int32_t rows, columns;
    int32_t format;       // DiptychFormat; parts in blocks may differ where each is a multiple of 32 rows
    const float *bias;    // [rows] or null
    const float *scales;  // of both kinds of int8: [rows, segments], see kernels/byte_linear.py; else null
    const int16_t *slopes;  // of DIPTYCH_I8_CODED: [rows, groups, 2], see kernels/byte_codes.py; else null
};

// One step: `sequences` chunks of tokens, laid end to end in `tokens`.
struct DiptychBatch {
    int32_t sequences;
    int32_t block_size;
    const int32_t *tokens;         // [sum of counts]
    const int32_t *counts;         // [sequences] tokens to compute, each at least 1
    const int32_t *starts;         // [sequences] position of the first of them
    const int32_t *tables;         // block tables end to end
    const int32_t *table_lengths;  // [sequences]
    const uint64_t *memories;      // [sequences] address of block 0 of the memory that holds the sequence
    const int32_t *memory_blocks;  // [sequences] blocks in that memory
    const int32_t *logit_rows;     // [sequences] after how many of its last tokens logits are wanted, 0 .. count
    const int32_t *abort_words;    // [sequences] set by another thread, or null
    const uint8_t *greedy;         // [sum of logit_rows] 1: the likeliest token is wanted, not the logits; or null
    const int32_t *adapters;       // [sequences] slot of the adapter that changes the model for it, -1: none; or null
    int64_t block_stride;          // elements from one block to the next, where more than this model's lies in a block;
                                   // else 0
    int32_t kept;                  // DiptychKv: of all memories
    const int32_t *turns;          // [sum of counts] row of the rotary tables for each token; null: its position
    const int32_t *ends;           // [sum of counts] the first position that a token does not see, at most the end of
                                   // its chunk; null: the one after its own
    const int32_t *parents;        // [sum of counts] trees of tokens: place, among its sequence's tokens of this step, of
                                   // the one that a token follows, -1: the last one before the step; a parent comes
                                   // first. A token sees its ancestors and what was there before; its position is their
                                   // number, its lane that of its place. Null: each follows the one before
    float *hidden;                 // [sum of logit_rows, hidden] gets the rows behind the final norm, or null. Those of
                                   // aborted sequences are not to be used
    int32_t taps;                  // so many layers are
    const int32_t *tapped;         // [taps] of which the step keeps the inputs, the residual stream
    float *features;               // [sum of counts, taps * hidden] gets them, or null
    const int32_t *layer_places;   // [layers, 2] where a layer's keys and values lie: table 0 is the one in `tables`,
                                   // from 1 on those in `window_tables`; and its place in a block. Null: table 0, and
                                   // its number
    int32_t windowed;              // tables that a sequence has in `window_tables`, for layers with a window
    const int32_t *window_tables;  // end to end: of each sequence all of them
    const int32_t *window_firsts;  // [sequences] blocks before the first one in them, which no token of the step reads
    const int32_t *window_lengths; // [sequences] blocks in each of them
    const float *enters;           // [sum of counts, hidden] the residual stream that enters a share's layers where these
                                   // are not the model's first; else null
    float *leaves;                 // the same where it leaves them and they are not the last, and no logits are wanted
    int32_t image_layers;          // first layers, behind each of which the residual stream takes rows of `images`; 0: none
    int32_t image_rows;            // rows there
    int64_t image_stride;          // numbers from one row to the next, at least image_layers * hidden
    const int32_t *image_places;   // [sum of counts] a token's row, or -1; null without any
    const float *images;           // [image_rows][image_layers][hidden], or null
    const float *embeddings;       // [image_rows][hidden], likewise image_stride apart: what the stream begins with for
                                   // tokens that have a row, in place of their scaled embeddings; or null
    int64_t page_block_bytes;      // of models with recurrent layers: bytes of a block that a page of states uses. The
                                   // blocks of a place in all of `window_tables` are its page (recurrent_step.h). Else 0
    uint8_t *stale;                // [sequences] gets 1 for a sequence that found other states than those before it,
                                   // and that counts as aborted; or null
    const int32_t *settled;        // [sequences] of models with recurrent layers: the first of its tokens behind which
                                   // states are kept, 1 .. count; the others are guesses. Null: all
};

#define DIPTYCH_CHANGE_PARTS 4

// A part of a change, for one of the matrices that a product joins.
struct DiptychChangePart {
    const void *b;          // [strips][ranks][16]: a strip has 16 columns, the last ones padded; null: no change
    int32_t begin, ranks;   // of the change's ranks
    int32_t strips;         // of this matrix
};

// What a LoRA adapter adds to one product: x A^T, each rank of it times its scale, times B^T. Numbers are stored in
// fp32 where the model is DIPTYCH_FP32, else in bf16.
struct DiptychChange {
    int32_t layer, which;   // which: DIPTYCH_QKV .. DIPTYCH_DOWN, or DIPTYCH_RECURRENT_IN .. DIPTYCH_RECURRENT_OUT
    const void *a;          // [ranks / 2][depth / 32][2][32], then a last rank [depth]; padded with zeros
    const float *scales;    // [ranks]
    int32_t depth, ranks;   // depth: inputs, rounded up to a multiple of 32
    int32_t parts;
    int32_t interleaved;    // 1: strips of two parts take turns, as those of gate and up do
    int32_t own_part;       // of a share: the part whose product is changed, of the rank's own; 0 for DIPTYCH_QKV
    struct DiptychChangePart part[DIPTYCH_CHANGE_PARTS];
};

typedef struct DiptychAdapter DiptychAdapter;

typedef struct DiptychModel DiptychModel;

int32_t diptych_abi_version(void);

// The message of the last call of this thread that failed.
const char *diptych_last_error(void);

// Name of the i-th instruction set that this machine can run, best first; null past the last.
const char *diptych_instruction_set(int32_t i, int32_t dtype);

// Null on failure. `instruction_set` null means the best one.
DiptychModel *diptych_model_new(const DiptychShape *shape, const char *instruction_set);
// A rank's share of a model, in fp32, bf16 or bytes.
DiptychModel *diptych_share_new(const DiptychShape *shape, const DiptychShare *share, const char *instruction_set);
void diptych_model_free(DiptychModel *model);

// Of each layer first. A layer with experts has all of them, and no dense feed-forward. Shares have no recurrent layers,
// and none without attention or a feed-forward.
int32_t diptych_set_layer(DiptychModel *model, int32_t layer, const DiptychLayer *own);

// Matrices and vectors are copied (packed); embedding and rotary tables stay the caller's and must outlive the
// model or the next call that replaces them. Which of an expert: DIPTYCH_GATE_UP or DIPTYCH_DOWN.
int32_t diptych_set_linear(DiptychModel *model, int32_t layer, int32_t which, const DiptychMatrix *parts,
                           int32_t count);
// Of a part of a rank's share: DIPTYCH_OUTPUT, DIPTYCH_GATE_UP, DIPTYCH_DOWN, DIPTYCH_SHARED_GATE_UP or
// DIPTYCH_SHARED_DOWN, which the model itself then does not have.
int32_t diptych_set_part_linear(DiptychModel *model, int32_t layer, int32_t part, int32_t which,
                                const DiptychMatrix *matrices, int32_t count);
// Likewise of an expert, by its number in the model: DIPTYCH_GATE_UP or DIPTYCH_DOWN.
int32_t diptych_set_part_expert(DiptychModel *model, int32_t layer, int32_t part, int32_t expert, int32_t which,
                                const DiptychMatrix *matrices, int32_t count);
int32_t diptych_set_expert(DiptychModel *model, int32_t layer, int32_t expert, int32_t which,
                           const DiptychMatrix *parts, int32_t count);
int32_t diptych_set_vector(DiptychModel *model, int32_t layer, int32_t which, const float *values, int32_t size);
int32_t diptych_set_embedding(DiptychModel *model, const void *rows);  // [vocab, hidden]; null: the model's own

// Whether the packed head has the very numbers of the embedding, rounded as that is: 1, and from then on rows are read
// out of the head wherever no table is set; else 0.
int32_t diptych_embed_from_head(DiptychModel *model);

// Rows of the embedding, before their scale: `rows` [count, hidden].
int32_t diptych_embedding_rows(const DiptychModel *model, const int32_t *tokens, int32_t count, float *rows);

// Packs what is set from now on into `file`, an empty one in memory, so that other processes can map it. `most`: bytes
// that it may take; address space, not memory. Before anything is set.
int32_t diptych_share_weights(DiptychModel *model, int32_t file, int64_t most);

// Ends that, of a model that has all its parts but rotary tables: puts the embedding beside them, if it is a table, and
// cuts the file to its size. It may be sealed then; nothing can be set any more but rotary tables and an embedding.
int32_t diptych_close_weights(DiptychModel *model);

// Takes all parts but rotary tables from such a file, of a model of the same shape and instruction set.
int32_t diptych_map_weights(DiptychModel *model, int32_t file);
int32_t diptych_set_rotations(DiptychModel *model, const DiptychRotation *tables, int32_t count, int32_t positions);

// What becomes of a core that several processes of a machine share: a byte in memory of all of them.
enum DiptychCoreState : uint8_t {
    DIPTYCH_CORE_FREE = 0,     // its owner has nothing to compute
    DIPTYCH_CORE_OWNED = 1,    // its owner computes, or is about to
    DIPTYCH_CORE_CLAIMED = 2,  // a guest of another process is on it
};

// An adapter of these changes, whose arrays are copied; null on failure. Any thread may call this while steps run.
DiptychAdapter *diptych_adapter_new(const DiptychModel *model, const DiptychChange *changes, int32_t count);
void diptych_adapter_free(DiptychAdapter *adapter);

// Puts an adapter, which stays the caller's, into a slot 0 .. 255, or none. No step that reads the slot may be launched
// and not collected; others may run.
int32_t diptych_set_adapter(DiptychModel *model, int32_t slot, const DiptychAdapter *adapter);

// From the next step on a guest helps wherever one of these cores is free, and leaves after the tickets that it has
// when its owner claims it. `states` [cores of the machine] must outlive the model, `cores` the
// call. What is computed does not depend on it.
int32_t diptych_set_guests(DiptychModel *model, uint8_t *states, const int32_t *cores, int32_t count);

// Computes one step, on the model's own thread, `threads` - 1 helpers and, from layer `guests_from` on, the cores of
// guests (none where there is no such layer): writes keys and values of all tokens into the blocks, and for each row
// after the last logit_rows[s] tokens of each sequence s, in order, either its logits into `logits` [rows that are not
// greedy, vocab], or its likeliest token into `likeliest` [sum of logit_rows]. There stays -1 for rows that are not
// greedy, that belong to aborted sequences, or that have a logit which is not finite; logits of aborted sequences are
// NaN. `likeliest` may be null where no row is greedy. One call at a time per model.
//
// Of a share: all ranks compute the same steps, and each ends once all ranks have written their keys and values. Every rank
// gets the likeliest tokens. `logits` [rows that are not greedy, vocab of the whole model] is for one of them, null for the
// others, and so are abort_words for rank 0: once all sequences are aborted all ranks stop before the same layer.
int32_t diptych_step(DiptychModel *model, const DiptychBatch *batch, int32_t threads, int32_t guests_from,
                     float *logits, int32_t *likeliest);

// Begins a step of which every row is greedy, or any step of a rank other than 0, and returns its number; 0 if it is refused. It is computed when the one
// launched before is over, and what it points into must live until it is collected: at most two are launched and not
// collected. `follows` [sequences] names the row of the step before whose likeliest token is a sequence's one token, in
// place of what stands in `tokens`; -1 or null: none.
uint64_t diptych_launch(DiptychModel *model, const DiptychBatch *batch, const int32_t *follows, int32_t threads,
                        int32_t guests_from, int32_t *likeliest);

// Sets the completion descriptor: a byte is written to `descriptor`, which does not block, whenever a launched step is
// done; to none where it is negative. It must stay open until the model is gone.
void diptych_tell(DiptychModel *model, int32_t descriptor);

// Whether the step of this number is done: not 0 when diptych_collect would not wait.
int32_t diptych_is_over(DiptychModel *model, uint64_t number);

// Waits for the step of this number, and returns what diptych_step would have; once for each, in their order.
int32_t diptych_collect(DiptychModel *model, uint64_t number);
}
#pragma GCC visibility pop
