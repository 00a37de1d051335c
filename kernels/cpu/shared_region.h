// Packed weights in a file in memory, which several processes map: one packs, the others read.
//
// The file begins with a header; behind it lie the packed matrices, the embedding where it is a table of its own, and a
// directory that says where everything is. Codes, which steps read apart, have the upper half of the address space; what
// is not written takes no memory. Addresses are stored as distances from the file's begin.
#pragma once

#include <cstdint>

struct DiptychModel;

namespace diptych {

// A mapping of such a file; none where `base` is null.
class SharedRegion {
  public:
    SharedRegion() = default;
    ~SharedRegion();
    SharedRegion(const SharedRegion &) = delete;
    SharedRegion &operator=(const SharedRegion &) = delete;

    // Maps the first `bytes` of `file` at an address that huge pages suit. Throws std::runtime_error.
    void map(int file, int64_t bytes, bool writable);

    // The same bytes at the same address, but not to be written any more. Throws std::runtime_error.
    void freeze();

    char *base() const { return base_; }
    int64_t bytes() const { return bytes_; }
    int file() const { return file_; }
    bool writable() const { return writable_; }

  private:
    char *base_ = nullptr;
    int64_t bytes_ = 0;
    int file_ = -1;
    bool writable_ = false;
};

// See diptych_share_weights, diptych_close_weights and diptych_map_weights. They throw std::exception.
void share_weights(DiptychModel &model, int file, int64_t most);
void close_weights(DiptychModel &model);
void map_weights(DiptychModel &model, int file);

}  // namespace diptych
