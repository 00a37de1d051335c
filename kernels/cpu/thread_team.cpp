#include "thread_team.h"

#include <algorithm>

namespace diptych {

namespace {

constexpr int kRankBits = 16;
constexpr uint64_t kRankMask = (1u << kRankBits) - 1;

// A phase in one word, so that joining, being through and being the last are decided by single exchanges:
// its number, then 12 bits of those that take part, then 12 of those that are through.
constexpr int kCountBits = 12;
constexpr uint64_t kCountMask = (1u << kCountBits) - 1;

uint64_t phase_word(uint64_t number, int part) {
    return number << (2 * kCountBits) | static_cast<uint64_t>(part) << kCountBits;
}
uint64_t number_of(uint64_t word) { return word >> (2 * kCountBits); }
uint64_t part_of(uint64_t word) { return word >> kCountBits & kCountMask; }
uint64_t through_of(uint64_t word) { return word & kCountMask; }

// Where the calling thread is in the run that it works for.
struct Place {
    uint64_t phase = 0;
    int rank = 0;
    bool part = true;                      // in this phase
    std::atomic<uint8_t> *core = nullptr;  // of a guest: what it stays for
    bool left = false;                     // it has seen that the core is not its own any more
    int groups = 1;                        // of this phase's tickets
};
thread_local Place place;

}  // namespace

ThreadTeam::~ThreadTeam() {
    closing_.store(true);
    jobs_.publish(((jobs_.value() >> kRankBits) + 1) << kRankBits);
    for (std::thread &helper : helpers_) helper.join();
    dismiss_guests();
}

void ThreadTeam::dismiss_guests() {
    dismissed_.store(true);
    for (auto &guest : guests_) guest->calls.advance();
    for (auto &guest : guests_) guest->thread.join();
    guests_.clear();
}

void ThreadTeam::invite(std::atomic<uint8_t> *states, const int32_t *cores, int count) {
    dismiss_guests();
    dismissed_.store(false);
    for (int i = 0; i < count; i++) {
        auto guest = std::make_unique<Guest>();
        guest->core = states + cores[i];
        guest->thread = std::thread([this, i, made = guest.get()] { attend(*made, i); });
        guests_.push_back(std::move(guest));
    }
}

void ThreadTeam::run(int threads, Body body, void *state) {
    uint64_t job = jobs_.value();
    while (static_cast<int>(helpers_.size()) < threads - 1) {
        int rank = static_cast<int>(helpers_.size()) + 1;
        helpers_.emplace_back([this, rank, job] { serve(rank, job); });
    }
    body_ = body;
    state_ = state;
    members_ = threads;
    first_phase_ = phases_.value();
    restart(Tickets::kMostGroups);
    phase_.store(phase_word(first_phase_, threads), std::memory_order_relaxed);
    place = {first_phase_};
    if (threads > 1) jobs_.publish((((job >> kRankBits) + 1) << kRankBits) | static_cast<uint64_t>(threads));
    body(state, 0);
    barrier();  // no member still works in `state` when we return
    if (!open_.load(std::memory_order_relaxed)) return;
    open_.store(false, std::memory_order_seq_cst);
    for (uint64_t seen = departures_.value(); present_.load(std::memory_order_seq_cst) != 0;) {
        seen = departures_.wait_beyond(seen);
    }
}

void ThreadTeam::welcome() {
    if (!guests_.empty()) open_.store(true, std::memory_order_seq_cst);
}

void ThreadTeam::serve(int rank, uint64_t seen) {
    for (;;) {
        seen = jobs_.wait_beyond(seen);
        if (closing_.load()) return;
        if (static_cast<uint64_t>(rank) < (seen & kRankMask)) {
            place = {first_phase_, rank};
            body_(state_, rank);
            barrier();
        }
    }
}

void ThreadTeam::attend(Guest &guest, int index) {
    for (uint64_t seen = 0;;) {
        seen = guest.calls.wait_beyond(seen);
        if (dismissed_.load()) return;
        guest.called.store(false, std::memory_order_relaxed);
        visit(guest, index);
    }
}

// From the run's first phase on, through those that are over, into the present one, and on while the core is ours.
void ThreadTeam::visit(Guest &guest, int index) {
    present_.fetch_add(1, std::memory_order_seq_cst);
    uint8_t free = DIPTYCH_CORE_FREE;
    if (open_.load(std::memory_order_seq_cst) && guest.core->compare_exchange_strong(free, DIPTYCH_CORE_CLAIMED)) {
        place = {first_phase_, members_ + index, false, guest.core};
        body_(state_, place.rank);
        if (place.part) arrive();
        uint8_t claimed = DIPTYCH_CORE_CLAIMED;
        if (!place.left) guest.core->compare_exchange_strong(claimed, DIPTYCH_CORE_FREE);
    }
    present_.fetch_sub(1, std::memory_order_seq_cst);
    departures_.advance();
}

// By a member, whenever it takes work: a core that becomes free in the middle of a long phase is used soon.
void ThreadTeam::call_guests() {
    for (auto &guest : guests_) {
        if (guest->core->load(std::memory_order_relaxed) != DIPTYCH_CORE_FREE) continue;
        if (guest->called.load(std::memory_order_relaxed) || guest->called.exchange(true)) continue;
        guest->calls.advance();
    }
}

// Whether this guest still has its core. Once it has lost it, it never has it again in this run: what looks like its
// claim is another process's, and by then it may have walked ahead of the members, into phases that an aborted run does
// not get to.
bool ThreadTeam::stays() {
    if (place.core->load(std::memory_order_relaxed) != DIPTYCH_CORE_CLAIMED) place.left = true;
    return !place.left;
}

// A guest's try to take part in the phase that it has come to.
bool ThreadTeam::join() {
    if (!stays()) return false;
    // A thread that came to the last phase when all were through is ahead, but for a moment.
    for (uint64_t seen = phases_.value(); seen < place.phase;) seen = phases_.wait_beyond(seen);
    uint64_t word = phase_.load(std::memory_order_acquire);
    while (number_of(word) == place.phase && through_of(word) < part_of(word)) {
        uint64_t joined = word + (uint64_t{1} << kCountBits);
        if (phase_.compare_exchange_weak(word, joined, std::memory_order_acq_rel)) return place.part = true;
    }
    return false;
}

bool ThreadTeam::may_take() {
    if (!place.part && !join()) return false;
    if (place.core != nullptr) return stays();
    if (open_.load(std::memory_order_relaxed)) call_guests();
    return true;
}

// Guided self-scheduling (Polychronopoulos and Kuck 1987) with two thirds of an even share at a time: a core of half
// the speed of another one still ends with it. A group is shared by those whose own it is, until another thread helps.
ThreadTeam::Run ThreadTeam::take_run(const Tickets &tickets, int64_t longest) {
    place.groups = tickets.groups;
    if (!may_take()) return {0, 0, 0};
    for (int i = 0; i < tickets.groups; i++) {
        int group = (place.rank + i) % tickets.groups;
        int64_t sharers = i == 0 ? (ranks() + tickets.groups - 1) / tickets.groups : ranks();
        int64_t first = tickets.begin(group), count = tickets.ends[group] - first;
        std::atomic<int64_t> &next = taken_[group].next;
        int64_t begin = next.load(std::memory_order_relaxed);
        while (begin < count) {
            int64_t size = 2 * (count - begin) / (3 * sharers);
            size = size > longest ? longest : size < 1 ? 1 : size;
            if (next.compare_exchange_weak(begin, begin + size, std::memory_order_relaxed)) {
                return {group, first + begin, first + begin + size};
            }
        }
    }
    return {0, 0, 0};
}

ThreadTeam::Tickets ThreadTeam::even(int64_t count) const {
    int64_t groups = std::min<int64_t>(ranks(), Tickets::kMostGroups);
    Tickets tickets;
    for (int64_t group = 1; group <= groups; group++) tickets.add(count * group / groups - count * (group - 1) / groups);
    return tickets;
}

void ThreadTeam::restart(int groups) {
    for (int group = 0; group < groups; group++) taken_[group].next.store(0, std::memory_order_relaxed);
}

// The last to be through opens the next phase: for the members, and the guests that join it.
void ThreadTeam::arrive() {
    uint64_t word = phase_.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (through_of(word) < part_of(word)) return;
    restart(place.groups);
    phase_.store(phase_word(place.phase + 1, members_), std::memory_order_release);
    phases_.publish(place.phase + 1);
}

void ThreadTeam::barrier() {
    if (place.part) {
        arrive();
        for (uint64_t seen = phases_.value(); seen <= place.phase;) seen = phases_.wait_beyond(seen);
    }
    place.phase++;
    place.part = place.core == nullptr;
    place.groups = 1;
}

}  // namespace diptych
