// Memory for packed weights: large chunks on huge pages, freed all at once with the model.
//
// A decode step reads every weight once, so that it goes as fast as memory does; on 4 KiB pages the walks for
// their addresses cost a quarter of that (measured in a virtual machine: 24 against 31 GB/s).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace diptych {

struct FreeMemory {
    void operator()(void *memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<void, FreeMemory>;

// Zeroed and aligned to a cache line. Throws std::bad_alloc.
Buffer zeroed(int64_t bytes);

class WeightMemory {
  public:
    // Zeroed, aligned to a cache line, lives as long as this object. Throws std::bad_alloc.
    void *take(int64_t bytes);

    // From now on takes come from these bytes, which are zero and another's, in their order.
    void take_from(char *begin, int64_t bytes) {
        next_ = begin;
        left_ = bytes;
        fixed_ = true;
    }

    // Address of the byte behind what was taken last.
    char *end() const { return next_; }

  private:
    bool fixed_ = false;
    std::vector<Buffer> chunks_;
    char *next_ = nullptr;
    int64_t left_ = 0;
};

}  // namespace diptych
