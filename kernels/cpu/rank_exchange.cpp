#include "rank_exchange.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "bf16.h"
#include "spin.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace diptych {

namespace {

constexpr int64_t kNumber = sizeof(float);

// Of a set of slots, of the logits, and of a kind of inputs: address space, of which what is written alone takes memory.
constexpr int64_t kSetBytes = int64_t{16} << 30;
constexpr int64_t kLogitBytes = int64_t{16} << 30;
constexpr int64_t kKindBytes = int64_t{8} << 30;
constexpr int kInputKinds = 3;
constexpr int64_t kPage = 4096;

[[noreturn]] void fail(const std::string &what) {
    throw std::runtime_error("the exchange of ranks: " + what);
}

}  // namespace

int64_t RankExchange::set_numbers() { return kSetBytes / kNumber; }

int64_t RankExchange::most_rows() const { return set_numbers() / (parts_ * stride_); }

int64_t RankExchange::most_logits() { return kLogitBytes / kNumber; }

int64_t RankExchange::header_bytes() const {
    auto bytes = static_cast<int64_t>(2 * sizeof(Stop)) + ranks_ * static_cast<int64_t>(sizeof(Counter));
    return round_up(bytes, kPage);
}

int64_t RankExchange::bytes() const {
    return header_bytes() + 2 * kSetBytes + kLogitBytes + kInputKinds * kKindBytes;
}

float *RankExchange::logits() const { return slots_ + 2 * set_numbers(); }

void *RankExchange::inputs(int kind) const {
    return reinterpret_cast<char *>(slots_) + 2 * kSetBytes + kLogitBytes + kind * kKindBytes;
}

// A row has at most so many bytes, rounded and with what its rounding keeps beside it.
int64_t RankExchange::most_inputs() const { return kKindBytes / (2 * kNumber * stride_ + kPage); }

bool RankExchange::meet() {
    uint64_t number = ++made_;
    if (asked_) stops_[number % 2].exchange.store(number, std::memory_order_relaxed);
    asked_ = false;
    Counter &own = counter(rank_);
    own.made.store(static_cast<uint32_t>(number), std::memory_order_seq_cst);
#if defined(__linux__)
    // Sleepers announce themselves before they look for the last time, both sequentially consistent.
    if (own.sleepers.load(std::memory_order_seq_cst) != 0) {
        syscall(SYS_futex, &own.made, FUTEX_WAKE, ranks_, nullptr, nullptr, 0);
    }
#endif
    for (int other = 0; other < ranks_; other++) {
        if (other != rank_ && !wait_for(counter(other), static_cast<uint32_t>(number))) return true;
    }
    return stops_[number % 2].exchange.load(std::memory_order_relaxed) == number;
}

#if defined(__linux__)

RankExchange::RankExchange(int file, int ranks, int rank, int parts, int64_t stride)
    : ranks_(ranks), rank_(rank), parts_(parts), stride_(stride) {
    auto size = static_cast<size_t>(bytes());
    if (file >= 0 && ftruncate(file, bytes()) != 0) fail(std::strerror(errno));
    int kind = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void *found = mmap(nullptr, size, PROT_READ | PROT_WRITE, kind | MAP_NORESERVE, file, 0);
    if (found == MAP_FAILED) fail(std::strerror(errno));
    static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
                  "counters are shared between processes");
    base_ = found;
    stops_ = static_cast<Stop *>(base_);
    counters_ = reinterpret_cast<Counter *>(stops_ + 2);
    slots_ = reinterpret_cast<float *>(static_cast<char *>(base_) + header_bytes());
}

RankExchange::~RankExchange() {
    if (base_ != nullptr) munmap(base_, static_cast<size_t>(bytes()));
}

// Returns false where the exchange was closed.
bool RankExchange::wait_for(Counter &other, uint32_t number) const {
    auto behind = [number](uint32_t seen) { return static_cast<int32_t>(seen - number) < 0; };
    for (int looks = 0; behind(other.made.load(std::memory_order_acquire)); looks++) {
        if (looks < kSpins) {
            relax();
        } else if (looks < kSpins + kYields) {
            std::this_thread::yield();
        } else {
            if (closed_.load()) return false;
            other.sleepers.fetch_add(1, std::memory_order_seq_cst);
            uint32_t seen = other.made.load(std::memory_order_seq_cst);
            const timespec second{1, 0};  // a rank that died leaves sleepers behind; this one may be closed meanwhile
            if (behind(seen)) syscall(SYS_futex, &other.made, FUTEX_WAIT, seen, &second, nullptr, 0);
            other.sleepers.fetch_sub(1, std::memory_order_relaxed);
        }
    }
    return true;
}

#else

RankExchange::RankExchange(int, int ranks, int rank, int parts, int64_t stride)
    : ranks_(ranks), rank_(rank), parts_(parts), stride_(stride) {
    fail("memory of several processes needs Linux");
}

RankExchange::~RankExchange() = default;

bool RankExchange::wait_for(Counter &, uint32_t) const { return false; }

#endif

}  // namespace diptych
