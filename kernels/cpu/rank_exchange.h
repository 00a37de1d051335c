// The exchange between the ranks of a group within a step: memory that all of them map, in which each leaves the sums of
// its parts and reads those of all.
//
//   a rank    writes into its slots of the exchange, then stores the number of the exchange in its counter
//   all       wait, by futex, until every counter has come to that number, then read all slots
//
// There are two sets of slots, which take turns. A rank writes the set of exchange n again in exchange n + 2, after every
// counter has come to n + 1, and so after every rank has read that of n. The word by which rank 0 stops a step has a place
// in each set: every rank that has come through an exchange finds the same one.
#pragma once

#include <atomic>
#include <cstdint>

namespace diptych {

class RankExchange {
  public:
    // Maps a file in memory, which all ranks of the group have, and gives it its size; where it is negative, memory of
    // this process alone, which is all `ranks` then. `stride`: numbers of a row. Throws std::runtime_error.
    RankExchange(int file, int ranks, int rank, int parts, int64_t stride);
    ~RankExchange();
    RankExchange(const RankExchange &) = delete;
    RankExchange &operator=(const RankExchange &) = delete;

    // Rows of a step, and numbers of logits, that there is room for.
    int64_t most_rows() const;
    static int64_t most_logits();

    // Where a part leaves its row at `place` in the exchange that comes, and where it lies in the one that was.
    float *slot(int64_t part, int64_t place) const { return at(made_ + 1, part, place); }
    const float *filled(int64_t part, int64_t place) const { return at(made_, part, place); }

    // Memory beside the slots, for the logits of all ranks. What lies in it is for the end of a step.
    float *logits() const;

    // Memory for normed rows, which every rank reads: kinds 0 .. 2, of which each has a place of its own, so that what is
    // zero in one stays so. There is room for so many rows of each.
    void *inputs(int kind) const;
    int64_t most_inputs() const;

    // By rank 0: the next exchange stops the step.
    void ask_to_stop() { asked_ = true; }

    // By one thread of a rank: says that its slots are filled and waits for those of all others. Returns whether the step
    // ends here, for all ranks alike.
    bool meet();

    // Any thread: what waits returns, and so does all that comes.
    void close() { closed_.store(true); }

  private:
    struct alignas(64) Counter {
        std::atomic<uint32_t> made;  // its last exchange, modulo 2^32
        std::atomic<uint32_t> sleepers;
    };
    struct alignas(64) Stop {
        std::atomic<uint64_t> exchange;  // that ends its step
    };

    float *at(uint64_t exchange, int64_t part, int64_t place) const {
        return slots_ + static_cast<int64_t>(exchange % 2) * set_numbers() + (place * parts_ + part) * stride_;
    }
    static int64_t set_numbers();
    int64_t header_bytes() const;
    int64_t bytes() const;
    Counter &counter(int rank) const { return counters_[rank]; }
    bool wait_for(Counter &other, uint32_t number) const;

    int ranks_, rank_;
    int64_t parts_, stride_;
    void *base_ = nullptr;
    Counter *counters_ = nullptr;
    Stop *stops_ = nullptr;
    float *slots_ = nullptr;
    uint64_t made_ = 0;  // exchanges
    bool asked_ = false;
    std::atomic<bool> closed_{false};
};

}  // namespace diptych
