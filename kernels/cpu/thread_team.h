// A small persistent team of threads that runs one function on all ranks, with barriers and shared tickets.
//
// Why not OpenMP: a prefill and a decode process share the same few cores, and a team that spins at its
// barriers while the other process holds the core would starve it. Waiting here spins for some microseconds
// (a step has hundreds of short phases), then yields, then sleeps in the kernel.
//
// Beside its members a team may have guests, one for each core that belongs to another process: they take part
// while that core is free, from any phase on, and leave it after the tickets that they have once its owner
// claims it. A phase is over when all that take part in it are; a guest that does not is not waited for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "abi.h"
#include "futex_counter.h"

namespace diptych {

class ThreadTeam {
  public:
    using Body = void (*)(void *state, int rank);

    ThreadTeam() = default;
    ~ThreadTeam();
    ThreadTeam(const ThreadTeam &) = delete;
    ThreadTeam &operator=(const ThreadTeam &) = delete;

    // From the next run on there is a guest for each of these cores, and for no other. `states` [cores of the
    // machine], each a DiptychCoreState, must outlive the team. Throws std::system_error if a thread cannot be started.
    void invite(std::atomic<uint8_t> *states, const int32_t *cores, int count);

    // How many ranks a run on so many threads may have: guests come after the members.
    int ranks(int threads) const { return threads + static_cast<int>(guests_.size()); }

    // Runs body(state, rank) for ranks 0 .. threads-1, rank 0 on the caller, and, once they are welcome, for guests
    // that find the time, and returns when all are done. All that is computed must be taken by tickets: a guest walks
    // through the phases that it has no part in. Throws std::system_error, with nothing run, if a thread cannot be
    // started.
    void run(int threads, Body body, void *state);

    // By rank 0 in a run: from now on guests may take part in it.
    void welcome();

    // All that take part in the phase wait for each other; what they wrote before is seen by all after. Also
    // starts the tickets at 0 again.
    void barrier();

    // How many ranks the present run may have.
    int ranks() const { return ranks(members_); }

    // The tickets of a phase, in groups of neighbours: group g ends before ticket ends[g]. A rank has a group of its
    // own, by its number, with which it begins: what it reads it wrote itself in the phase before, or read in the last
    // step, and it does not come from another core or from memory. All ranks name the same tickets.
    struct Tickets {
        static constexpr int kMostGroups = 8;
        int groups = 0;
        int64_t ends[kMostGroups] = {};

        int64_t begin(int group) const { return group == 0 ? 0 : ends[group - 1]; }
        void add(int64_t count) { ends[groups] = begin(groups) + count, groups++; }
    };

    // So many tickets, in a group for each rank.
    Tickets even(int64_t count) const;

    // Tickets begin .. end - 1, which are of one group; none where begin is end.
    struct Run {
        int group;
        int64_t begin, end;
    };

    // Tickets of this phase that no other thread has; none when all are taken, or for a thread without a part in it.
    // Work split by tickets balances itself when another process holds one of the cores: a thread whose own group is
    // taken helps with the others. Results do not depend on which thread computes what.
    //
    // Neighbours: many while many are left, at last one, and never more than `longest`. For work that lies in memory in
    // the order of its tickets: a thread that reads on fetches what it needs itself, and not what another core is about
    // to read.
    Run take_run(const Tickets &tickets, int64_t longest);

  private:
    struct Guest {
        std::atomic<uint8_t> *core = nullptr;
        std::thread thread;
        FutexCounter calls;
        std::atomic<bool> called{false};  // and not awake yet
    };

    void serve(int rank, uint64_t seen);
    void attend(Guest &guest, int index);
    void visit(Guest &guest, int index);
    void call_guests();
    void dismiss_guests();
    bool stays();
    bool join();
    bool may_take();
    void restart(int groups);
    void arrive();

    std::vector<std::thread> helpers_;
    std::vector<std::unique_ptr<Guest>> guests_;
    // Number of the job above 16 bits of its ranks: a helper learns both in one look, so that it cannot join a
    // job that it has no part in. A job that it has a part in cannot end, nor body_ and state_ change, without it.
    FutexCounter jobs_;
    Body body_ = nullptr;
    void *state_ = nullptr;
    int members_ = 0;           // of the present run
    uint64_t first_phase_ = 0;  // likewise
    // The number of the phase, how many take part in it, and how many of these are through; see thread_team.cpp.
    alignas(64) std::atomic<uint64_t> phase_{0};
    FutexCounter phases_;  // its number alone, to wait for
    struct alignas(64) Counter {
        std::atomic<int64_t> next{0};
    };
    Counter taken_[Tickets::kMostGroups];  // tickets of each group, in this phase
    // Guests between entering and leaving a run. A run is over when it is closed to them and none is left.
    alignas(64) std::atomic<int> present_{0};
    std::atomic<bool> open_{false};  // from `welcome` to the end of the run: members call guests meanwhile
    FutexCounter departures_;
    std::atomic<bool> closing_{false};    // helpers end
    std::atomic<bool> dismissed_{false};  // guests end
};

}  // namespace diptych
