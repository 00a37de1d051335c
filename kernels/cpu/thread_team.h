// A small persistent team of threads that runs one function on all ranks, with barriers and shared tickets.
//
// Why not OpenMP: a prefill and a decode process share the same few cores, and a team that spins at its
// barriers while the other process holds the core would starve it. Waiting here spins for some microseconds
// (a step has hundreds of short phases), then yields, then sleeps in the kernel.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace diptych {

class ThreadTeam {
  public:
    using Body = void (*)(void *state, int rank);

    ThreadTeam() = default;
    ~ThreadTeam();
    ThreadTeam(const ThreadTeam &) = delete;
    ThreadTeam &operator=(const ThreadTeam &) = delete;

    // Runs body(state, rank) for ranks 0 .. threads-1, rank 0 on the caller, and returns when all are done.
    // Throws std::system_error, with nothing run, if a thread cannot be started.
    void run(int threads, Body body, void *state);

    // All ranks of the present run wait for each other; what they wrote before is seen by all after. Also
    // starts the tickets at 0 again.
    void barrier();

    // The first of `chunk` tickets in a row that nobody else has. Work split by tickets balances itself when
    // another process holds one of the cores; results do not depend on who computes what.
    int64_t take(int64_t chunk) { return tickets_.fetch_add(chunk, std::memory_order_relaxed); }

  private:
    // A number that grows, and threads that wait for it to leave a value.
    class Epoch {
      public:
        uint64_t value() const { return value_.load(std::memory_order_acquire); }
        void publish(uint64_t value);
        uint64_t wait_beyond(uint64_t seen);  // the value that was found instead

      private:
        std::atomic<uint64_t> value_{0};
        std::atomic<int> sleepers_{0};
        std::mutex mutex_;
        std::condition_variable wake_;
    };

    void serve(int rank, uint64_t seen);

    std::vector<std::thread> helpers_;
    // Number of the job above 16 bits of its ranks: a helper learns both in one look, so that it cannot join a
    // job that it has no part in. A job that it has a part in cannot end, nor body_ and state_ change, without it.
    Epoch jobs_;
    Epoch barriers_;
    Body body_ = nullptr;
    void *state_ = nullptr;
    std::atomic<int> ranks_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> tickets_{0};
    std::atomic<bool> closing_{false};
};

}  // namespace diptych
