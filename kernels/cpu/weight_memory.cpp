#include "weight_memory.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "bf16.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace diptych {

namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kChunk = 32 << 20;  // what the last one wastes at most, of address space more than of memory

Buffer allocated(int64_t bytes, int64_t alignment) {
    void *memory = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(round_up(bytes, alignment)));
    if (memory == nullptr) throw std::bad_alloc();
    return Buffer(memory);
}

}  // namespace

Buffer zeroed(int64_t bytes) {
    Buffer memory = allocated(std::max<int64_t>(bytes, 1), 64);
    std::memset(memory.get(), 0, static_cast<size_t>(round_up(std::max<int64_t>(bytes, 1), 64)));
    return memory;
}

void *WeightMemory::take(int64_t bytes) {
    int64_t size = round_up(bytes, 64);
    if (size > left_ && fixed_) throw std::bad_alloc();
    if (size > left_) {
        // Small models take what they need; the rest of a huge page would be memory for nothing.
        int64_t chunk = chunks_.empty() && size < kHugePage ? kHugePage : std::max(kChunk, round_up(size, kHugePage));
        chunks_.push_back(allocated(chunk, kHugePage));
        next_ = static_cast<char *>(chunks_.back().get());
        left_ = chunk;
#if defined(__linux__)
        madvise(next_, static_cast<size_t>(chunk), MADV_HUGEPAGE);  // advice: refused, pages stay small
#endif
    }
    void *memory = next_;
    next_ += size;
    left_ -= size;
    if (!fixed_) std::memset(memory, 0, static_cast<size_t>(size));
    return memory;
}

}  // namespace diptych
