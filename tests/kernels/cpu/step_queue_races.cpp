// Steps launched ahead, under ThreadSanitizer (`make sanitize`): the token that a step sampled reaches the step that
// follows it and the thread that collects it, whose memory is gone by then; the end of a step is notified; and a model
// ends with steps that were not collected.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "step_queue.h"
#include "model.h"
#include "step_state.h"

using namespace diptych;

namespace {

constexpr int kModels = 3000, kVocab = 64;

// In place of a decoder: the likeliest token is the one that comes after the row's own.
void count_on(void *state, int rank) {
    StepState &step = *static_cast<StepState *>(state);
    ThreadTeam &team = step.model->team;
    auto tickets = team.even(static_cast<int64_t>(step.wanted.size()));
    for (auto run = team.take_run(tickets, 1); run.begin < run.end; run = team.take_run(tickets, 1)) {
        const WantedRow &wanted = step.wanted[static_cast<size_t>(run.begin)];
        int32_t token = step.rows[static_cast<size_t>(wanted.row)].token;
        Peak *peaks = &step.peaks[static_cast<size_t>(wanted.peaks)];
        for (int b = 0; b < step.model->head.blocks; b++) peaks[b] = {0, 0};
        int32_t next = (token + 1) % kVocab;
        peaks[next / kColumns] = {1, next % kColumns};
    }
    team.barrier();
    (void)rank;
}

const Kernels kCounting{"counting", {count_on, nullptr, nullptr, nullptr}, false};

std::unique_ptr<DiptychModel> make_model() {
    auto model = std::make_unique<DiptychModel>();
    model->shape = {DIPTYCH_FP32, 1, 32, 32, 1, 1, 32, kVocab, 1e-5f, 1.0f};
    model->kernels = &kCounting;
    model->layers.resize(1);
    model->head.blocks = kVocab / kColumns;
    model->head_ends = {1};
    model->mixed_places = {0};
    model->block_kv_heads = 1;
    model->step = {new StepState(), [](StepState *step) { delete step; }};
    model->step_queue = {new StepQueue(*model), [](StepQueue *queue) { delete queue; }};
    return model;
}

// A step of one row; freed with its results as soon as it is collected.
struct Step {
    int32_t token, count = 1, start = 0, table = 0, length = 1, blocks = 1, rows = 1, follows, sampled = -1;
    uint64_t memory = 1, number = 0;
    uint8_t greedy = 1;

    Step(DiptychModel &model, int32_t first, bool following, int threads) : token(first), follows(following ? 0 : -1) {
        DiptychBatch batch{1,       16,      &token, &count,  &start, &table, &length,
                           &memory, &blocks, &rows,  nullptr, &greedy};
        std::string error;
        QueuedStep step{batch, &follows, threads, 0, nullptr, &sampled, true};
        number = model.step_queue->add(step, StepQueue::kMostBefore, error);
        if (number == 0) {
            std::printf("refused: %s\n", error.c_str());
            std::abort();
        }
    }
};

struct Pipe {
    int ends[2];

    Pipe() {
        if (pipe2(ends, O_NONBLOCK) != 0) std::abort();
    }
    ~Pipe() {
        for (int end : ends) close(end);
    }

    // As an event loop waits: looks at the step, then for bytes.
    bool wait_for(StepQueue &queue, uint64_t number) {
        char bytes[64];
        while (!queue.done(number)) {
            pollfd wanted{ends[0], POLLIN, 0};
            if (poll(&wanted, 1, 20'000) != 1 || read(ends[0], bytes, sizeof bytes) < 1) return false;
        }
        return true;
    }
};

bool run_model(std::mt19937 &chooser) {
    Pipe completions;  // outlives the model
    std::unique_ptr<DiptychModel> model = make_model();
    model->step_queue->set_completion_fd(completions.ends[1]);
    int threads = 1 + static_cast<int>(chooser() % 3), steps = static_cast<int>(chooser() % 40);
    int32_t first = static_cast<int32_t>(chooser() % kVocab);
    std::unique_ptr<Step> present, following;
    for (int n = 0; n < steps; n++) {
        following = std::make_unique<Step>(*model, n == 0 ? first : 0, n > 0, threads);
        if (present != nullptr) {
            std::string error;
            if (chooser() % 2 && !completions.wait_for(*model->step_queue, present->number)) {
                std::printf("no byte came for step %d\n", n);
                return false;
            }
            if (model->step_queue->collect(present->number, error) != DIPTYCH_OK) return false;
            if (present->sampled != (first + n) % kVocab) {
                std::printf("step %d drew %d after %d\n", n, present->sampled, first);
                return false;
            }
        }
        present = std::move(following);
    }
    model.reset();  // the last step was not collected
    return present == nullptr || present->sampled == (first + steps) % kVocab;
}

}  // namespace

int main() {
    std::mt19937 chooser(1);
    for (int n = 0; n < kModels; n++) {
        if (!run_model(chooser)) return 1;
    }
    std::printf("%d models, all steps in order\n", kModels);
    return 0;
}
