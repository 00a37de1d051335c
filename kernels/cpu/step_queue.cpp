#include "step_queue.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>

#include "model.h"
#include "model_share.h"
#include "step_state.h"

namespace diptych {

namespace {

int64_t sum(const int32_t *numbers, int32_t count) {
    int64_t total = 0;
    for (int32_t i = 0; i < count; i++) total += numbers[i];
    return total;
}

}  // namespace

StepQueue::StepQueue(DiptychModel &model) : model_(model), thread_([this] { serve(); }) {}

StepQueue::~StepQueue() {
    slot(++launched_).launch.batch.sequences = 0;  // the word to end
    added_.publish(launched_);
    thread_.join();
}

bool StepQueue::idle() {
    std::lock_guard<std::mutex> lock(outside_);
    return launched_ == collected_;
}

std::string StepQueue::refusal(const QueuedStep &launch, uint64_t before) const {
    if (launched_ - collected_ > before) {
        return before == 0 ? "another step of this model is running" : "two steps are launched and not collected";
    }
    for (int32_t s = 0; launch.follows != nullptr && s < launch.batch.sequences; s++) {
        if (launch.follows[s] < -1 || launch.follows[s] >= rows_) return "a sequence follows a row that is not there";
        if (launch.follows[s] >= 0 && launch.batch.counts[s] != 1) return "a chunk of tokens cannot follow a row";
    }
    return "";
}

uint64_t StepQueue::add(const QueuedStep &launch, uint64_t before, std::string &error) {
    std::lock_guard<std::mutex> lock(outside_);
    error = refusal(launch, before);
    if (!error.empty()) return 0;
    uint64_t number = ++launched_;
    slot(number) = {launch, DIPTYCH_OK, ""};
    rows_ = sum(launch.batch.logit_rows, launch.batch.sequences);
    added_.publish(number);
    return number;
}

int32_t StepQueue::collect(uint64_t number, std::string &error) {
    {
        std::lock_guard<std::mutex> lock(outside_);
        if (number != collected_ + 1 || number > launched_) {
            error = "steps are collected once and in the order of their launches";
            return DIPTYCH_INVALID;
        }
    }
    for (uint64_t done = done_.value(); done < number;) done = done_.wait_beyond(done);
    std::lock_guard<std::mutex> lock(outside_);
    collected_ = number;
    error = slot(number).error;
    return slot(number).status;
}

void StepQueue::serve() {
    for (uint64_t number = 1;; number++) {
        if (added_.value() < number) added_.wait_beyond(number - 1);
        if (slot(number).launch.batch.sequences == 0) return;
        // Read before another step can be launched into its slot.
        int descriptor = slot(number).launch.notify ? completion_fd_.load() : -1;
        compute(slot(number));
        done_.publish(number);
        const char byte = 1;
        while (descriptor >= 0 && write(descriptor, &byte, 1) < 0 && errno == EINTR) {
        }
    }
}

void StepQueue::compute(Slot &slot) {
    try {
        slot.status = run(slot.launch);
    } catch (const std::exception &failure) {
        slot.status = DIPTYCH_FAILED;
        slot.error = failure.what();
        sampled_.clear();
    }
}

int32_t StepQueue::run(const QueuedStep &launch) {
    DiptychBatch batch = launch.batch;
    int64_t rows = sum(batch.logit_rows, batch.sequences);
    tokens_.assign(batch.tokens, batch.tokens + sum(batch.counts, batch.sequences));
    // A row that sampled nothing goes on with any token: its results are not read. Nor are those after a failed step.
    auto drew = [&](int32_t row) {
        return static_cast<size_t>(row) < sampled_.size() ? std::max(sampled_[static_cast<size_t>(row)], 0) : 0;
    };
    size_t token = 0;
    for (int32_t s = 0; launch.follows != nullptr && s < batch.sequences; s++) {
        if (launch.follows[s] >= 0) tokens_[token] = drew(launch.follows[s]);
        token += static_cast<size_t>(batch.counts[s]);
    }
    batch.tokens = tokens_.data();
    sampled_.assign(static_cast<size_t>(rows), -1);
    StepState &step = *model_.step;
    prepare(step, model_, batch, model_.team.ranks(launch.threads), launch.logits);
    step.guests_from = launch.guests_from;
    model_.team.run(launch.threads, model_.kernels->body[model_.shape.dtype], &step);
    if (step.stopped) return DIPTYCH_ALL_ABORTED;
    if (model_.share) take_results(step, launch.logits, launch.likeliest);
    if (launch.likeliest == nullptr) return DIPTYCH_OK;
    if (!model_.share) step.tell_likeliest(launch.likeliest);
    // Kept here: the caller may free `likeliest` once the step is collected, before the next one begins.
    sampled_.assign(launch.likeliest, launch.likeliest + rows);
    return DIPTYCH_OK;
}

}  // namespace diptych
