// The C interface: checks its arguments, keeps exceptions inside, and records what went wrong.
#include <algorithm>
#include <exception>
#include <string>

#include "step_queue.h"
#include "model.h"
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

Linear *find_linear(DiptychModel *model, int32_t layer, int32_t which) {
    if (which == DIPTYCH_HEAD) return &model->head;
    if (layer < 0 || layer >= model->shape.layers) return nullptr;
    Layer &found = model->layers[layer];
    switch (which) {
        case DIPTYCH_QKV: return &found.qkv;
        case DIPTYCH_OUTPUT: return &found.output;
        case DIPTYCH_GATE_UP: return &found.gate_up;
        case DIPTYCH_DOWN: return &found.down;
        default: return nullptr;
    }
}

struct Expected {
    int32_t parts, rows[3], columns;
};

Expected expected_parts(const DiptychModel &model, int32_t which) {
    const DiptychShape &shape = model.shape;
    switch (which) {
        case DIPTYCH_QKV: return {3, {model.query_width(), model.kv_width(), model.kv_width()}, shape.hidden};
        case DIPTYCH_OUTPUT: return {1, {shape.hidden}, model.query_width()};
        case DIPTYCH_GATE_UP: return {2, {shape.intermediate, shape.intermediate}, shape.hidden};
        case DIPTYCH_DOWN: return {1, {shape.hidden}, shape.intermediate};
        default: return {1, {shape.vocab}, shape.hidden};
    }
}

std::vector<float> *find_norm(DiptychModel *model, int32_t layer, int32_t which) {
    if (which == DIPTYCH_FINAL_NORM) return &model->final_norm;
    if (layer < 0 || layer >= model->shape.layers) return nullptr;
    Layer &found = model->layers[layer];
    switch (which) {
        case DIPTYCH_INPUT_NORM: return &found.input_norm;
        case DIPTYCH_POST_NORM: return &found.post_norm;
        case DIPTYCH_QUERY_NORM: return &found.query_norm;
        case DIPTYCH_KEY_NORM: return &found.key_norm;
        default: return nullptr;
    }
}

bool in_blocks(int32_t format) {
    return (format >= DIPTYCH_Q4_0 && format <= DIPTYCH_Q8_0) || (format >= DIPTYCH_Q2_K && format <= DIPTYCH_IQ4_XS);
}

// Whether the parts of a matrix may have the formats that they have. One block of columns has one format.
bool formats_join(const DiptychMatrix *parts, int32_t count, int32_t which) {
    for (int32_t p = 0; p < count; p++) {
        if (parts[p].format >= DIPTYCH_Q2_K && parts[p].columns % 256 != 0) return false;
        if (parts[p].format == parts[0].format) continue;
        if (which != DIPTYCH_QKV || !in_blocks(parts[0].format)) return false;
        for (int32_t before = 0; before < p; before++) {
            if (parts[before].rows % kColumns != 0) return false;
        }
    }
    return true;
}

bool format_fits(const DiptychModel &model, int32_t format) {
    switch (model.shape.dtype) {
        case DIPTYCH_BLOCKS: return in_blocks(format);
        case DIPTYCH_BYTES: return format == DIPTYCH_I8 || format == DIPTYCH_I8_CODED;
        default: return format == DIPTYCH_DENSE;
    }
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

bool sizes_make_sense(const DiptychShape &s) {
    constexpr int32_t limit = 1 << 24;
    for (int32_t size : {s.layers, s.hidden, s.intermediate, s.heads, s.kv_heads, s.head_dim, s.vocab}) {
        if (size < 1 || size > limit) return false;
    }
    int64_t width = static_cast<int64_t>(s.heads + 2LL * s.kv_heads) * s.head_dim;
    return s.heads % s.kv_heads == 0 && s.head_dim % 2 == 0 && width <= limit;
}

}  // namespace

int32_t diptych_abi_version(void) { return DIPTYCH_ABI_VERSION; }

const char *diptych_last_error(void) { return last_error.c_str(); }

const char *diptych_instruction_set(int32_t i, int32_t dtype) {
    std::vector<const Kernels *> all = runnable(dtype);
    return i >= 0 && i < static_cast<int32_t>(all.size()) ? all[i]->name : nullptr;
}

DiptychModel *diptych_model_new(const DiptychShape *shape, const char *instruction_set) {
    try {
        const Kernels *kernels = find_kernels(shape->dtype, instruction_set);
        if (kernels == nullptr) {
            fail(DIPTYCH_INVALID, "this machine or build does not have the instruction set");
            return nullptr;
        }
        if (!sizes_make_sense(*shape)) {
            fail(DIPTYCH_INVALID, "the model's sizes are not those of a decoder");
            return nullptr;
        }
        auto model = std::make_unique<DiptychModel>();
        model->shape = *shape;
        model->kernels = kernels;
        model->layers.resize(static_cast<size_t>(shape->layers));
        model->step = {new StepState(), [](StepState *step) { delete step; }};
        model->step_queue = {new StepQueue(*model), [](StepQueue *queue) { delete queue; }};
        return model.release();
    } catch (const std::exception &error) {
        fail(DIPTYCH_FAILED, error.what());
        return nullptr;
    }
}

void diptych_model_free(DiptychModel *model) { delete model; }

int32_t diptych_set_linear(DiptychModel *model, int32_t layer, int32_t which, const DiptychMatrix *parts,
                           int32_t count) {
    try {
        Linear *to = find_linear(model, layer, which);
        if (to == nullptr) return fail(DIPTYCH_INVALID, "no such matrix");
        Expected expected = expected_parts(*model, which);
        if (count != expected.parts) return fail(DIPTYCH_INVALID, "the matrix has another number of parts");
        for (int32_t p = 0; p < count; p++) {
            if (parts[p].rows != expected.rows[p] || parts[p].columns != expected.columns) {
                return fail(DIPTYCH_INVALID, "the matrix has another size");
            }
            if (!format_fits(*model, parts[p].format) || !formats_join(parts, count, which)) {
                return fail(DIPTYCH_INVALID, "the matrix has a format that the model's dtype does not have");
            }
            bool coded = parts[p].format == DIPTYCH_I8_CODED;
            if ((coded || parts[p].format == DIPTYCH_I8) != (parts[p].scales != nullptr)) {
                return fail(DIPTYCH_INVALID, "matrices of bytes have scales, and no others do");
            }
            if (coded != (parts[p].slopes != nullptr)) {
                return fail(DIPTYCH_INVALID, "matrices in codes have slopes, and no others do");
            }
        }
        pack(*to, model->memory, parts, count, which == DIPTYCH_GATE_UP, model->shape.dtype,
             model->kernels->reads_codes ? &model->codes : nullptr);
        return DIPTYCH_OK;
    } catch (const std::exception &error) {
        return fail(DIPTYCH_FAILED, error.what());
    }
}

int32_t diptych_set_norm(DiptychModel *model, int32_t layer, int32_t which, const float *weight, int32_t size) {
    try {
        std::vector<float> *to = find_norm(model, layer, which);
        if (to == nullptr) return fail(DIPTYCH_INVALID, "no such norm");
        bool of_head = which == DIPTYCH_QUERY_NORM || which == DIPTYCH_KEY_NORM;
        if (size != (of_head ? model->shape.head_dim : model->shape.hidden)) {
            return fail(DIPTYCH_INVALID, "the norm has another size");
        }
        to->assign(weight, weight + size);
        return DIPTYCH_OK;
    } catch (const std::exception &error) {
        return fail(DIPTYCH_FAILED, error.what());
    }
}

int32_t diptych_set_window(DiptychModel *model, int32_t layer, int32_t window) {
    if (layer < 0 || layer >= model->shape.layers) return fail(DIPTYCH_INVALID, "no such layer");
    if (window < 1) return fail(DIPTYCH_INVALID, "a window holds at least one token");
    model->layers[layer].window = window;
    return DIPTYCH_OK;
}

int32_t diptych_set_embedding(DiptychModel *model, const void *rows) {
    model->embedding = rows;
    return DIPTYCH_OK;
}

int32_t diptych_set_rotary(DiptychModel *model, const float *cosines, const float *sines, int32_t positions) {
    if (!model->step_queue->idle()) return fail(DIPTYCH_INVALID, "a step of this model is running");
    model->cosines = cosines;
    model->sines = sines;
    model->positions = positions;
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
    if (likeliest == nullptr || !samples_all(*batch)) {
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
