// A counter whose waiters spin, yield, and then sleep until it leaves a value.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace diptych {

class FutexCounter {
  public:
    uint64_t value() const { return value_.load(std::memory_order_acquire); }
    void publish(uint64_t value);  // by one thread at a time
    void advance();                // by any
    uint64_t wait_beyond(uint64_t seen);  // the value that was found instead

  private:
    void wake();

    std::atomic<uint64_t> value_{0};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable woken_;
};

}  // namespace diptych
