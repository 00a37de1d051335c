// The steps of a model, computed one after the other by a thread of its own, each from the moment the one before is
// over: who prepares the next step and who tells the tokens of the last one keep no core waiting.
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
struct Launch {
    DiptychBatch batch;
    const int32_t *follows;  // [sequences] or null, see diptych_launch
    int32_t threads;
    int32_t guests_from;  // the layer from which on guests may help
    float *logits;
    int32_t *likeliest;  // or null where nothing is drawn
    bool told;           // whether its end is told of, see Launches::tell
};

// Any thread may launch and collect, one at a time does either.
class Launches {
  public:
    // Starts the thread. Throws std::system_error if it cannot.
    explicit Launches(DiptychModel &model);
    ~Launches();  // after the steps that were launched
    Launches(const Launches &) = delete;
    Launches &operator=(const Launches &) = delete;

    // The step's number, above 0; 0, and why in `error`, if more than `before` steps are launched and not collected
    // (at most kMostBefore), or if it follows what is not there.
    uint64_t add(const Launch &launch, uint64_t before, std::string &error);
    static constexpr uint64_t kMostBefore = 1;

    // Waits for the step of this number, the first that is not collected: its DiptychStatus, and in `error` what went
    // wrong.
    int32_t collect(uint64_t number, std::string &error);

    // Whether the step of this number is computed: `collect` would not wait for it.
    bool over(uint64_t number) const { return done_.value() >= number; }

    // A byte is written to `descriptor` whenever a step that is to be told of is over; to none where it is negative.
    // One that does not fit into a pipe is lost: there are some to be read then.
    void tell(int descriptor) { told_ = descriptor; }

    // Whether no step is launched and not collected.
    bool idle();

  private:
    struct Slot {
        Launch launch;
        int32_t status;
        std::string error;
    };

    Slot &slot(uint64_t number) { return slots_[number % slots_.size()]; }
    std::string refusal(const Launch &launch, uint64_t before) const;
    void serve();
    void compute(Slot &slot);
    int32_t run(const Launch &launch);

    DiptychModel &model_;
    std::array<Slot, kMostBefore + 2> slots_{};  // and one for the word to end
    std::mutex outside_;                         // of those who launch and collect
    uint64_t launched_ = 0, collected_ = 0;
    int64_t rows_ = 0;  // of the step launched last
    Epoch added_, done_;
    std::atomic<int> told_{-1};
    std::vector<int32_t> tokens_, drawn_;  // of the thread: what it computes, and what the step before drew
    std::thread thread_;
};

}  // namespace diptych
