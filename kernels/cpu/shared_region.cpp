#include "shared_region.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "bf16.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace diptych {

namespace {

constexpr int64_t kHugePage = 2 << 20;

[[noreturn]] void fail(const char *what) {
    throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

}  // namespace

#if defined(__linux__)

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

SharedRegion::~SharedRegion() {
    if (base_ != nullptr) munmap(base_, static_cast<size_t>(bytes_));
}

void SharedRegion::map(int file, int64_t bytes, bool writable) {
    // Of a larger piece of address space the part that begins with a huge page.
    auto whole = static_cast<size_t>(bytes + kHugePage);
    void *found = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) fail("no address space for shared weights");
    auto *begin = static_cast<char *>(found);
    int64_t skip = round_up(reinterpret_cast<int64_t>(begin), kHugePage) - reinterpret_cast<int64_t>(begin);
    // Private where it is only read: a file that is sealed against writes cannot be mapped otherwise before Linux 6.7.
    int kind = (writable ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED;
    void *base = mmap(begin + skip, static_cast<size_t>(bytes), writable ? PROT_READ | PROT_WRITE : PROT_READ, kind, file, 0);
    if (base == MAP_FAILED) {
        int error = errno;
        munmap(found, whole);
        errno = error;
        fail("shared weights cannot be mapped");
    }
    if (skip > 0) munmap(begin, static_cast<size_t>(skip));
    int64_t behind = round_up(bytes, 4096);
    munmap(begin + skip + behind, static_cast<size_t>(kHugePage - skip + bytes - behind));
    base_ = static_cast<char *>(base);
    bytes_ = bytes;
    file_ = file;
    writable_ = writable;
    madvise(base_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);  // advice: refused, pages stay small
}

void SharedRegion::freeze() {
    void *again = mmap(base_, static_cast<size_t>(bytes_), PROT_READ, MAP_PRIVATE | MAP_FIXED, file_, 0);
    if (again == MAP_FAILED) fail("shared weights cannot be mapped again");
    madvise(base_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);
    writable_ = false;
}

#else

SharedRegion::~SharedRegion() = default;
void SharedRegion::map(int, int64_t, bool) { throw std::runtime_error("weights are shared on Linux only"); }
void SharedRegion::freeze() { throw std::runtime_error("weights are shared on Linux only"); }

#endif

}  // namespace diptych
