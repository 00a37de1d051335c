// Queue of a model's launched steps. A thread of its own computes one after the other, each from the moment the one
// before is done: preparing the next step and sending the tokens of the last one keep no core waiting.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "abi.h"
#include "futex_counter.h"

namespace diptych {

// A step that was not refused (step_state.h), and where its results go; all that it points into outlives it.
struct QueuedStep {
    DiptychBatch batch;
    const int32_t *follows;  // [sequences] or null, see diptych_launch
    int32_t threads;
    int32_t guests_from;  // the layer from which on guests may help
    float *logits;
    int32_t *likeliest;  // or null where nothing is sampled
    bool notify;         // whether its end writes to the completion descriptor
};

// Any thread may launch and collect, one at a time does either.
class StepQueue {
  public:
    // Starts the thread. Throws std::system_error if it cannot.
    explicit StepQueue(DiptychModel &model);
    ~StepQueue();  // after the steps that were launched
    StepQueue(const StepQueue &) = delete;
    StepQueue &operator=(const StepQueue &) = delete;

    // The step's number, above 0; 0, and why in `error`, if more than `before` steps are launched and not collected
    // (at most kMostBefore), or if it follows what is not there.
    uint64_t add(const QueuedStep &launch, uint64_t before, std::string &error);
    static constexpr uint64_t kMostBefore = 1;

    // Waits for the step of this number, the first that is not collected: its DiptychStatus, and in `error` what went
    // wrong.
    int32_t collect(uint64_t number, std::string &error);

    // Whether the step of this number is computed: `collect` would not wait for it.
    bool done(uint64_t number) const { return done_.value() >= number; }

    // Writes a byte to `descriptor` whenever a step with `notify` is done; to none where it is negative. A byte that
    // does not fit into a pipe is lost: there are some to be read then.
    void set_completion_fd(int descriptor) { completion_fd_ = descriptor; }

    // Whether no step is launched and not collected.
    bool idle();

  private:
    struct Slot {
        QueuedStep launch;
        int32_t status;
        std::string error;
    };

    Slot &slot(uint64_t number) { return slots_[number % slots_.size()]; }
    std::string refusal(const QueuedStep &launch, uint64_t before) const;
    void serve();
    void compute(Slot &slot);
    int32_t run(const QueuedStep &launch);

    DiptychModel &model_;
    std::array<Slot, kMostBefore + 2> slots_{};  // and one that ends the thread
    std::mutex outside_;                         // of the threads that launch and collect
    uint64_t launched_ = 0, collected_ = 0;
    int64_t rows_ = 0;  // of the step launched last
    FutexCounter added_, done_;
    std::atomic<int> completion_fd_{-1};
    std::vector<int32_t> tokens_, sampled_;  // of the thread: its step's tokens, and those that the step before sampled
    std::thread thread_;
};

}  // namespace diptych
