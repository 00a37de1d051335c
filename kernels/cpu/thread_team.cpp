#include "thread_team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace diptych {

namespace {

// About 10 µs of looking (a pause is some 40 ns), then about as long of offering the core to others. A barrier
// between balanced phases opens within a microsecond when both cores are ours.
constexpr int kSpins = 256;
constexpr int kYields = 32;

constexpr int kRankBits = 16;
constexpr uint64_t kRankMask = (1u << kRankBits) - 1;

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void ThreadTeam::Epoch::publish(uint64_t value) {
    value_.store(value, std::memory_order_seq_cst);
    // Sleepers announce themselves before they look at the value for the last time (both sequentially
    // consistent): either they see the new value or we see them.
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
}

uint64_t ThreadTeam::Epoch::wait_beyond(uint64_t seen) {
    for (int i = 0; i < kSpins + kYields; i++) {
        uint64_t now = value();
        if (now != seen) return now;
        if (i < kSpins) {
            relax();
        } else {
            std::this_thread::yield();
        }
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    uint64_t now = seen;
    wake_.wait(lock, [&] { return (now = value_.load(std::memory_order_seq_cst)) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return now;
}

ThreadTeam::~ThreadTeam() {
    closing_.store(true);
    jobs_.publish(((jobs_.value() >> kRankBits) + 1) << kRankBits);
    for (std::thread &helper : helpers_) helper.join();
}

void ThreadTeam::run(int threads, Body body, void *state) {
    uint64_t job = jobs_.value();
    while (static_cast<int>(helpers_.size()) < threads - 1) {
        int rank = static_cast<int>(helpers_.size()) + 1;
        helpers_.emplace_back([this, rank, job] { serve(rank, job); });
    }
    body_ = body;
    state_ = state;
    ranks_.store(threads, std::memory_order_relaxed);
    tickets_.store(0, std::memory_order_relaxed);
    if (threads > 1) jobs_.publish((((job >> kRankBits) + 1) << kRankBits) | static_cast<uint64_t>(threads));
    body(state, 0);
    barrier();  // nobody still works in `state` when we return
}

void ThreadTeam::barrier() {
    int ranks = ranks_.load(std::memory_order_relaxed);
    if (ranks == 1) {
        tickets_.store(0, std::memory_order_relaxed);
        return;
    }
    uint64_t seen = barriers_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks) {
        arrived_.store(0, std::memory_order_relaxed);
        tickets_.store(0, std::memory_order_relaxed);
        barriers_.publish(seen + 1);
    } else {
        barriers_.wait_beyond(seen);
    }
}

void ThreadTeam::serve(int rank, uint64_t seen) {
    for (;;) {
        seen = jobs_.wait_beyond(seen);
        if (closing_.load()) return;
        if (static_cast<uint64_t>(rank) < (seen & kRankMask)) {
            body_(state_, rank);
            barrier();
        }
    }
}

}  // namespace diptych
