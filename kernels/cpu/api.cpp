// The C interface: checks its arguments, keeps exceptions inside, and records what went wrong.
#include <algorithm>
#include <exception>
#include <string>

#include "adapter.h"
#include "embedding.h"
#include "step_queue.h"
#include "model.h"
#include "model_parts.h"
#include "model_share.h"
#include "recurrent_kinds.h"
#include "shared_region.h"
#include "step_state.h"

using namespace diptych;

namespace {

thread_local std::string last_error;

int32_t fail(int32_t status, const std::string &message) {
    last_error = message;
    return status;
}

const Kernels *find_kernels(int32_t dtype, const char *name) {
    for (const Kernels *kernels : runnable(dtype)) {
        if (name == nullptr || std::string(kernels->name) == name) return kernels;
    }
    return nullptr;
}

// The number of a step that was launched; 0, with the last error set, if it was refused.
uint64_t add(DiptychModel *model, const QueuedStep &launch, uint64_t before) {
    try {
        std::string found = refusal(*model, launch.batch, launch.threads);
        uint64_t number = found.empty() ? model->step_queue->add(launch, before, found) : 0;
        if (number == 0) fail(DIPTYCH_INVALID, found);
        return number;
    } catch (const std::exception &error) {
        fail(DIPTYCH_FAILED, error.what());
        return 0;
    }
}

// Whether every row of a batch is sampled, so that none needs room for logits.
bool samples_all(const DiptychBatch &batch) {
    int64_t rows = 0;
    for (int32_t s = 0; s < batch.sequences; s++) rows += batch.logit_rows[s];
    return batch.greedy != nullptr && std::find(batch.greedy, batch.greedy + rows, 0) == batch.greedy + rows;
}

// Whether the weights lie where they cannot be written.
bool sealed(const DiptychModel &model) { return model.region.base() != nullptr && !model.region.writable(); }

// Calls `what`, which throws where it cannot be done.
template <class What>
int32_t attempt(What what) {
    try {
        what();
        return DIPTYCH_OK;
    } catch (const std::exception &error) {
        return fail(DIPTYCH_FAILED, error.what());
    }
}

// Packs a matrix of the model, or of one of its experts; `to` null: there is none.
int32_t set_linear(DiptychModel *model, Linear *to, int32_t layer, int32_t which, bool expert,
                   const DiptychMatrix *parts, int32_t count) {
    try {
        if (to == nullptr) return fail(DIPTYCH_INVALID, "no such matrix");
        if (sealed(*model)) return fail(DIPTYCH_INVALID, "the model's weights are shared");
        std::string found = refused_parts(*model, layer, which, expert, parts, count);
        if (!found.empty()) return fail(DIPTYCH_INVALID, found);
        bool interleaved = (which == DIPTYCH_GATE_UP || which == DIPTYCH_SHARED_GATE_UP) && count == 2;
        int32_t dtype = in_fp32(which) ? static_cast<int32_t>(DIPTYCH_FP32) : model->shape.dtype;
        pack(*to, model->memory, parts, count, interleaved, dtype,
             model->kernels->reads_codes ? &model->codes : nullptr);
        return DIPTYCH_OK;
    } catch (const std::exception &error) {
        return fail(DIPTYCH_FAILED, error.what());
    }
}

// Packs a matrix of an own part, or of one of its experts; `to` null: there is none.
int32_t set_part(DiptychModel *model, Linear *to, int32_t part, int32_t which, bool expert, const DiptychMatrix *matrices,
                 int32_t count) {
    if (to == nullptr) return fail(DIPTYCH_INVALID, "no such matrix");
    std::string found = refused_part_linear(*model, part, which, expert, matrices, count);
    if (!found.empty()) return fail(DIPTYCH_INVALID, found);
    WeightMemory *codes = model->kernels->reads_codes ? &model->codes : nullptr;
    return attempt([&] { pack(*to, model->memory, matrices, count, count == 2, model->shape.dtype, codes); });
}

// `share`: of a rank, or null.
DiptychModel *new_model(const DiptychShape *shape, const DiptychShare *share, const char *instruction_set) {
    try {
        const Kernels *kernels = find_kernels(shape->dtype, instruction_set);
        if (kernels == nullptr) {
            fail(DIPTYCH_INVALID, "this machine or build does not have the instruction set");
            return nullptr;
        }
        std::string found = refused_shape(*shape, share != nullptr);
        if (found.empty() && share != nullptr) found = refused_share(*shape, *share);
        if (!found.empty()) {
            fail(DIPTYCH_INVALID, found);
            return nullptr;
        }
        auto model = std::make_unique<DiptychModel>();
        model->shape = *shape;
        model->kernels = kernels;
        model->layers.resize(static_cast<size_t>(shape->layers));
        for (int32_t head = 0; head < shape->heads; head++) model->mixed_places.push_back(int64_t{head} * shape->head_dim);
        for (int32_t head = 1; head <= shape->kv_heads; head++) {
            model->head_ends.push_back(head * (shape->heads / shape->kv_heads));
        }
        model->block_kv_heads = shape->kv_heads;
        if (share != nullptr) {
            model->share = {new ModelShare(*shape, *share), [](ModelShare *own) { delete own; }};
            place_heads(*model, *share);
        }
        model->step = {new StepState(), [](StepState *step) { delete step; }};
        model->step_queue = {new StepQueue(*model), [](StepQueue *queue) { delete queue; }};
        return model.release();
    } catch (const std::exception &error) {
        fail(DIPTYCH_FAILED, error.what());
        return nullptr;
    }
}

}  // namespace

int32_t diptych_abi_version(void) { return DIPTYCH_ABI_VERSION; }

const char *diptych_last_error(void) { return last_error.c_str(); }

const char *diptych_instruction_set(int32_t i, int32_t dtype) {
    std::vector<const Kernels *> all = runnable(dtype);
    return i >= 0 && i < static_cast<int32_t>(all.size()) ? all[i]->name : nullptr;
}

DiptychModel *diptych_model_new(const DiptychShape *shape, const char *instruction_set) {
    return new_model(shape, nullptr, instruction_set);
}

DiptychModel *diptych_share_new(const DiptychShape *shape, const DiptychShare *share, const char *instruction_set) {
    return new_model(shape, share, instruction_set);
}

void diptych_model_free(DiptychModel *model) {
    if (model->share) model->share->exchange.close();  // a step may wait for a rank that is gone
    delete model;
}

int32_t diptych_set_layer(DiptychModel *model, int32_t layer, const DiptychLayer *own) {
    try {
        if (layer < 0 || layer >= model->shape.layers) return fail(DIPTYCH_INVALID, "no such layer");
        std::string found = refused_layer(*model, *own);
        if (!found.empty()) return fail(DIPTYCH_INVALID, found);
        Layer &of = model->layers[static_cast<size_t>(layer)];
        of.own = *own;
        model->step->recurrent.page = page_bytes(*model);
        if (model->share) {
            resize_part_experts(*model->share, layer, own->experts != 0);
        } else {
            of.experts.resize(own->experts ? static_cast<size_t>(model->shape.experts.count) : 0);
        }
        return DIPTYCH_OK;
    } catch (const std::exception &error) {
        return fail(DIPTYCH_FAILED, error.what());
    }
}

int32_t diptych_set_linear(DiptychModel *model, int32_t layer, int32_t which, const DiptychMatrix *parts,
                           int32_t count) {
    return set_linear(model, find_linear(*model, layer, which), layer, which, false, parts, count);
}

int32_t diptych_set_part_linear(DiptychModel *model, int32_t layer, int32_t part, int32_t which,
                                const DiptychMatrix *matrices, int32_t count) {
    return set_part(model, find_part_linear(*model, layer, part, which), part, which, false, matrices, count);
}

int32_t diptych_set_part_expert(DiptychModel *model, int32_t layer, int32_t part, int32_t expert, int32_t which,
                                const DiptychMatrix *matrices, int32_t count) {
    return set_part(model, find_part_expert(*model, layer, part, expert, which), part, which, true, matrices, count);
}

int32_t diptych_set_expert(DiptychModel *model, int32_t layer, int32_t expert, int32_t which,
                           const DiptychMatrix *parts, int32_t count) {
    return set_linear(model, find_expert(*model, layer, expert, which), layer, which, true, parts, count);
}

int32_t diptych_set_vector(DiptychModel *model, int32_t layer, int32_t which, const float *values, int32_t size) {
    try {
        std::vector<float> *to = find_vector(*model, layer, which);
        if (to == nullptr) return fail(DIPTYCH_INVALID, "no such vector");
        if (!vector_fits(*model, layer, which, size)) return fail(DIPTYCH_INVALID, "the vector has another size");
        to->assign(values, values + size);
        return DIPTYCH_OK;
    } catch (const std::exception &error) {
        return fail(DIPTYCH_FAILED, error.what());
    }
}

int32_t diptych_set_embedding(DiptychModel *model, const void *rows) {
    model->embedding = rows == nullptr ? model->own_embedding : rows;
    return DIPTYCH_OK;
}

int32_t diptych_embed_from_head(DiptychModel *model) {
    model->embeds_from_head = model->embeds_from_head || head_has_embedding(*model);
    if (model->embeds_from_head) model->embedding = nullptr;
    return model->embeds_from_head;
}

int32_t diptych_embedding_rows(const DiptychModel *model, const int32_t *tokens, int32_t count, float *rows) {
    if (model->embedding == nullptr && !model->embeds_from_head) return fail(DIPTYCH_INVALID, "no embedding is set");
    for (int64_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || tokens[i] >= model->shape.vocab) return fail(DIPTYCH_INVALID, "no such token");
        read_embedding(*model, tokens[i], rows + i * model->shape.hidden);
    }
    return DIPTYCH_OK;
}

int32_t diptych_share_weights(DiptychModel *model, int32_t file, int64_t most) {
    return attempt([&] { share_weights(*model, file, most); });
}

int32_t diptych_close_weights(DiptychModel *model) {
    return attempt([&] { close_weights(*model); });
}

int32_t diptych_map_weights(DiptychModel *model, int32_t file) {
    return attempt([&] { map_weights(*model, file); });
}

int32_t diptych_set_rotations(DiptychModel *model, const DiptychRotation *tables, int32_t count, int32_t positions) {
    try {
        if (!model->step_queue->idle()) return fail(DIPTYCH_INVALID, "a step of this model is running");
        if (count < 0 || positions < 1) return fail(DIPTYCH_INVALID, "rotary tables reach no position");
        model->rotations.assign(tables, tables + count);
        model->positions = positions;
        return DIPTYCH_OK;
    } catch (const std::exception &error) {
        return fail(DIPTYCH_FAILED, error.what());
    }
}

DiptychAdapter *diptych_adapter_new(const DiptychModel *model, const DiptychChange *changes, int32_t count) {
    try {
        auto adapter = std::make_unique<DiptychAdapter>(model->shape.layers, model->share ? model->share->own_parts : 1);
        for (int32_t i = 0; i < count; i++) {
            std::string found = refused_change(*model, changes[i]);
            if (!found.empty()) {
                fail(DIPTYCH_INVALID, found);
                return nullptr;
            }
            add_change(*adapter, *model, changes[i]);
        }
        return adapter.release();
    } catch (const std::exception &error) {
        fail(DIPTYCH_FAILED, error.what());
        return nullptr;
    }
}

void diptych_adapter_free(DiptychAdapter *adapter) { delete adapter; }

int32_t diptych_set_adapter(DiptychModel *model, int32_t slot, const DiptychAdapter *adapter) {
    if (slot < 0 || slot >= static_cast<int32_t>(model->adapters.size())) return fail(DIPTYCH_INVALID, "no such slot");
    model->adapters[static_cast<size_t>(slot)] = adapter;
    return DIPTYCH_OK;
}

int32_t diptych_set_guests(DiptychModel *model, uint8_t *states, const int32_t *cores, int32_t count) {
    try {
        if (!model->step_queue->idle()) return fail(DIPTYCH_INVALID, "a step of this model is running");
        if (count < 0 || count > 1024) return fail(DIPTYCH_INVALID, "guests must be 0 .. 1024");
        static_assert(std::atomic<uint8_t>::is_always_lock_free && sizeof(std::atomic<uint8_t>) == 1,
                      "states are shared between processes");
        model->team.invite(reinterpret_cast<std::atomic<uint8_t> *>(states), cores, count);
        return DIPTYCH_OK;
    } catch (const std::exception &error) {
        return fail(DIPTYCH_FAILED, error.what());
    }
}

int32_t diptych_step(DiptychModel *model, const DiptychBatch *batch, int32_t threads, int32_t guests_from,
                     float *logits, int32_t *likeliest) {
    QueuedStep launch{*batch, nullptr, threads, guests_from, logits, likeliest, false};
    uint64_t number = add(model, launch, 0);
    return number == 0 ? DIPTYCH_INVALID : diptych_collect(model, number);
}

uint64_t diptych_launch(DiptychModel *model, const DiptychBatch *batch, const int32_t *follows, int32_t threads,
                        int32_t guests_from, int32_t *likeliest) {
    bool follows_rank_0 = model->share && model->share->rank > 0;  // which has the logits
    if (!follows_rank_0 && (likeliest == nullptr || !samples_all(*batch))) {
        fail(DIPTYCH_INVALID, "a step that is launched samples every row");
        return 0;
    }
    return add(model, {*batch, follows, threads, guests_from, nullptr, likeliest, true}, StepQueue::kMostBefore);
}

void diptych_tell(DiptychModel *model, int32_t descriptor) { model->step_queue->set_completion_fd(descriptor); }

int32_t diptych_is_over(DiptychModel *model, uint64_t number) { return model->step_queue->done(number); }

int32_t diptych_collect(DiptychModel *model, uint64_t number) {
    std::string error;
    int32_t status = model->step_queue->collect(number, error);
    return error.empty() ? status : fail(status, error);
}
