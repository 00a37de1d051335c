#include "futex_counter.h"

#include <thread>

#include "spin.h"

namespace diptych {

void FutexCounter::publish(uint64_t value) {
    value_.store(value, std::memory_order_seq_cst);
    wake();
}

void FutexCounter::advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    wake();
}

void FutexCounter::wake() {
    // Sleepers announce themselves before they look at the value for the last time (both sequentially
    // consistent): either they see the new value or we see them.
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    woken_.notify_all();
}

uint64_t FutexCounter::wait_beyond(uint64_t seen) {
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
    woken_.wait(lock, [&] { return (now = value_.load(std::memory_order_seq_cst)) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return now;
}

}  // namespace diptych
