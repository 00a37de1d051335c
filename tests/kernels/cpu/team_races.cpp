// Members and guests of a thread team, under ThreadSanitizer (`make sanitize`): every ticket of every phase is worked
// on once, and all that was done in a phase is seen in the next, while owners take their cores back at any moment and
// other processes claim them.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "thread_team.h"

using namespace diptych;

namespace {

constexpr int kTeams = 1500, kRuns = 12, kPhases = 40, kCores = 4;

struct Job {
    ThreadTeam *team;
    int members;
    int stop_at;       // an even phase, or none
    int welcome_from;  // a phase, or none
    std::vector<int> counts;  // by item: plain numbers, so that an unordered access is a race
    std::atomic<bool> stopped{false};
    std::atomic<int64_t> by_guests{0};
};

void work(Job &job, int64_t item, int phase, bool guest) {
    int &count = job.counts[static_cast<size_t>(item)];
    if (count != phase) {
        std::printf("item %d was worked on %d times before phase %d\n", static_cast<int>(item), count, phase);
        std::abort();
    }
    count++;
    if (guest) job.by_guests.fetch_add(1, std::memory_order_relaxed);
    for (volatile int spin = 0; spin < 200; spin = spin + 1) {
    }
}

// In groups of all sizes, empty ones too; how many differs from phase to phase.
ThreadTeam::Tickets uneven(int64_t items, int phase) {
    ThreadTeam::Tickets tickets;
    int groups = 1 + phase % ThreadTeam::Tickets::kMostGroups;
    for (int64_t left = items, group = 1; group <= groups; group++) {
        int64_t count = group == groups ? left : left * (phase % 5) / 7;
        tickets.add(count);
        left -= count;
    }
    return tickets;
}

// As a step: rank 0 may end it at the begin of a layer of two phases, the others look after the first.
void body(void *state, int rank) {
    Job &job = *static_cast<Job *>(state);
    auto items = static_cast<int64_t>(job.counts.size());
    for (int phase = 0; phase < kPhases; phase++) {
        if (rank == 0 && phase == job.stop_at) job.stopped = true;
        if (rank == 0 && phase == job.welcome_from) job.team->welcome();
        bool guest = rank >= job.members;
        auto tickets = phase % 3 == 0 ? job.team->even(items) : uneven(items, phase);
        int64_t longest = phase % 3 == 0 ? 9 : 2;
        for (auto run = job.team->take_run(tickets, longest); run.begin < run.end;
             run = job.team->take_run(tickets, longest)) {
            if (run.begin < tickets.begin(run.group) || run.end > tickets.ends[run.group]) std::abort();
            for (int64_t i = run.begin; i < run.end; i++) work(job, i, phase, guest);
        }
        job.team->barrier();
        // As if the owner, which computes on this core, had interrupted it: others go on and may be through.
        if (guest && std::rand() % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
        if (phase % 2 == 0 && job.stopped) return;
    }
}

bool run_team(std::atomic<uint8_t> *states, std::mt19937 &chooser, int64_t &by_guests) {
    ThreadTeam team;
    const int32_t others[kCores - 1] = {1, 2, 3};
    team.invite(states, others, static_cast<int>(chooser() % kCores));
    for (int run = 0; run < kRuns; run++) {
        // Helpers that the last run had no use for may wake up meanwhile.
        if (chooser() % 4 == 0) team.invite(states, others, static_cast<int>(chooser() % kCores));
        int welcome_from = chooser() % 2 ? 0 : static_cast<int>(chooser() % (kPhases + 5));
        Job job{&team, 1 + static_cast<int>(chooser() % 3), -1, welcome_from, std::vector<int>(1 + chooser() % 60)};
        if (chooser() % 3 == 0) job.stop_at = 2 * static_cast<int>(chooser() % (kPhases / 2));
        team.run(job.members, body, &job);
        int phases = job.stop_at < 0 ? kPhases : job.stop_at + 1;
        for (int count : job.counts) {
            if (count != phases) {
                std::printf("an item was worked on %d times in %d phases\n", count, phases);
                return false;
            }
        }
        by_guests += job.by_guests;
    }
    return true;
}

}  // namespace

int main() {
    std::atomic<uint8_t> states[kCores] = {};
    std::atomic<bool> over{false};
    std::thread owners([&] {  // and guests of other processes, which claim what is free
        std::mt19937 chooser(1);
        while (!over) {
            std::atomic<uint8_t> &core = states[1 + chooser() % (kCores - 1)];
            uint8_t free = DIPTYCH_CORE_FREE;
            if (chooser() % 3 == 0) {
                core.compare_exchange_strong(free, DIPTYCH_CORE_CLAIMED);
            } else {
                core = chooser() % 2 ? DIPTYCH_CORE_FREE : DIPTYCH_CORE_OWNED;
            }
            std::this_thread::sleep_for(std::chrono::microseconds(chooser() % 300));
        }
    });
    std::mt19937 chooser(2);
    int64_t by_guests = 0;
    bool right = true;
    for (int team = 0; right && team < kTeams; team++) right = run_team(states, chooser, by_guests);
    over = true;
    owners.join();
    std::printf("%d teams, %lld items by guests\n", kTeams, static_cast<long long>(by_guests));
    return right && by_guests > 0 ? 0 : 1;
}
