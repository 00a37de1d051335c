// What lies in the file of shared weights, and where.
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "model.h"
#include "recurrent_kinds.h"
#include "shared_region.h"
#include "step_state.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace diptych {

namespace {

constexpr uint64_t kMagic = 0x3153574844504944;  // "DIPDHWS1"
constexpr int64_t kHeaderBytes = 4096;
constexpr int64_t kHugePage = 2 << 20;

struct Header {
    uint64_t magic;
    int32_t abi, embeds_from_head;
    char kernels[32];
    DiptychShape shape;
    int64_t bytes;                      // of the file
    int64_t end, codes_begin, codes_end;  // of what is written: [0, end) and [codes_begin, codes_end)
    int64_t directory, directory_bytes;
    int64_t embedding;  // 0: none
};
static_assert(sizeof(Header) <= kHeaderBytes && std::is_trivially_copyable<Header>::value);
static_assert(std::is_trivially_copyable<Linear>::value);

// Writes the directory: the parts of a model one after another, addresses as distances.
class DirectoryWriter {
  public:
    explicit DirectoryWriter(const char *base) : base_(base) {}
    static constexpr bool kReads = false;

    template <class Value>
    void value(Value &of) {
        static_assert(std::is_trivially_copyable<Value>::value);
        const auto *from = reinterpret_cast<const char *>(&of);
        bytes_.insert(bytes_.end(), from, from + sizeof of);
    }

    void matrix(Linear &of) {
        Linear placed = of;
        move(placed.data);
        move(placed.bias);
        move(placed.codes);
        for (int32_t s = 0; s < placed.section_count; s++) move(placed.sections[s].data);
        value(placed);
    }

    void vector(std::vector<float> &of) {
        auto size = static_cast<int64_t>(of.size());
        value(size);
        const auto *from = reinterpret_cast<const char *>(of.data());
        bytes_.insert(bytes_.end(), from, from + of.size() * sizeof(float));
    }

    const std::vector<char> &bytes() const { return bytes_; }

  private:
    template <class Pointer>
    void move(Pointer *&address) {
        if (address == nullptr) return;
        int64_t distance = reinterpret_cast<const char *>(address) - base_;
        address = reinterpret_cast<Pointer *>(distance);
    }

    const char *base_;
    std::vector<char> bytes_;
};

// Reads what DirectoryWriter wrote. Throws std::runtime_error where it ends too soon or points out of the file.
class DirectoryReader {
  public:
    DirectoryReader(char *base, const Header &header)
        : base_(base), bytes_(header.bytes), next_(base + header.directory), left_(header.directory_bytes) {}
    static constexpr bool kReads = true;

    template <class Value>
    void value(Value &of) {
        std::memcpy(&of, take(sizeof of), sizeof of);
    }

    void matrix(Linear &of) {
        value(of);
        move(of.data);
        move(of.bias);
        move(of.codes);
        for (int32_t s = 0; s < of.section_count && s < Linear::kMostSections; s++) move(of.sections[s].data);
    }

    void vector(std::vector<float> &of) {
        int64_t size = 0;
        value(size);
        if (size < 0 || size > left_) fail();
        of.resize(static_cast<size_t>(size));
        std::memcpy(of.data(), take(size * static_cast<int64_t>(sizeof(float))), of.size() * sizeof(float));
    }

  private:
    [[noreturn]] static void fail() { throw std::runtime_error("the directory of shared weights is broken"); }

    const char *take(int64_t bytes) {
        if (bytes > left_) fail();
        const char *found = next_;
        next_ += bytes;
        left_ -= bytes;
        return found;
    }

    template <class Pointer>
    void move(Pointer *&address) {
        auto distance = reinterpret_cast<int64_t>(address);
        if (distance == 0) return;
        if (distance < 0 || distance >= bytes_) fail();
        address = reinterpret_cast<Pointer *>(base_ + distance);
    }

    char *base_;
    int64_t bytes_;
    const char *next_;
    int64_t left_;
};

template <class Directory>
void exchange(Directory &directory, Layer &layer, const DiptychShape &shape) {
    directory.value(layer.own);
    for (Linear *matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down, &layer.router, &layer.shared_gate_up,
                           &layer.shared_down, &layer.recurrent.in, &layer.recurrent.side, &layer.recurrent.inner,
                           &layer.recurrent.steps, &layer.recurrent.out}) {
        directory.matrix(*matrix);
    }
    for (std::vector<float> *vector :
         {&layer.input_norm, &layer.post_norm, &layer.query_norm, &layer.key_norm, &layer.attention_output_norm,
          &layer.feed_forward_output_norm, &layer.sinks, &layer.router_correction}) {
        directory.vector(*vector);
    }
    for (std::vector<float> &vector : layer.recurrent.vectors) directory.vector(vector);
    if (Directory::kReads) layer.experts.resize(layer.own.experts ? static_cast<size_t>(shape.experts.count) : 0);
    for (Expert &expert : layer.experts) {
        directory.matrix(expert.gate_up);
        directory.matrix(expert.down);
    }
}

template <class Directory>
void exchange(Directory &directory, DiptychModel &model) {
    for (Layer &layer : model.layers) exchange(directory, layer, model.shape);
    directory.matrix(model.head);
    directory.vector(model.final_norm);
}

int64_t embedding_bytes(const DiptychModel &model) {
    int64_t number = model.shape.dtype == DIPTYCH_FP32 ? sizeof(float) : sizeof(bf16);
    return static_cast<int64_t>(model.shape.vocab) * model.shape.hidden * number;
}

void name_kernels(char *to, const DiptychModel &model) {
    std::strncpy(to, model.kernels->name, sizeof Header::kernels - 1);
}

#if defined(__linux__)

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

// Advice: refused, pages stay small, and come as they are read.
void collapse(char *begin, char *end) {
    int64_t whole = (end - begin) / kHugePage * kHugePage;
    if (whole > 0) madvise(begin, static_cast<size_t>(whole), MADV_COLLAPSE);
}

void populate(char *begin, char *end) {
    auto from = reinterpret_cast<int64_t>(begin) / 4096 * 4096;
    madvise(reinterpret_cast<void *>(from), static_cast<size_t>(reinterpret_cast<int64_t>(end) - from), MADV_POPULATE_READ);
}

void set_size(int file, int64_t bytes) {
    if (ftruncate(file, bytes) != 0) throw std::runtime_error("the file of shared weights cannot have its size");
}

int64_t size_of(int file) {
    struct stat found;
    if (fstat(file, &found) != 0) throw std::runtime_error("the file of shared weights cannot be read");
    return found.st_size;
}

#else

void collapse(char *, char *) {}
void populate(char *, char *) {}
void set_size(int, int64_t) {}
int64_t size_of(int) { return 0; }

#endif

}  // namespace

void share_weights(DiptychModel &model, int file, int64_t most) {
    if (model.region.base() != nullptr || model.head.data != nullptr) {
        throw std::runtime_error("the model has weights already");
    }
    int64_t half = round_up(most, kHugePage) + kHugePage;
    set_size(file, 2 * half);
    model.region.map(file, 2 * half, true);
    model.memory.take_from(model.region.base() + kHeaderBytes, half - kHeaderBytes);
    model.codes.take_from(model.region.base() + half, half);
}

void close_weights(DiptychModel &model) {
    SharedRegion &region = model.region;
    if (!region.writable()) throw std::runtime_error("the model's weights are not being shared");
    char *base = region.base();
    Header header{};
    header.magic = kMagic;
    header.abi = DIPTYCH_ABI_VERSION;
    name_kernels(header.kernels, model);
    header.shape = model.shape;
    header.embeds_from_head = model.embeds_from_head;
    if (!model.embeds_from_head) {
        if (model.embedding == nullptr) throw std::runtime_error("the model has no embedding");
        void *to = model.memory.take(embedding_bytes(model));
        std::memcpy(to, model.embedding, static_cast<size_t>(embedding_bytes(model)));
        model.embedding = model.own_embedding = to;
        header.embedding = static_cast<char *>(to) - base;
    } else {
        model.embedding = nullptr;
    }
    DirectoryWriter writer(base);
    exchange(writer, model);
    header.directory_bytes = static_cast<int64_t>(writer.bytes().size());
    auto *directory = static_cast<char *>(model.memory.take(header.directory_bytes));
    std::memcpy(directory, writer.bytes().data(), writer.bytes().size());
    header.directory = directory - base;
    header.end = model.memory.end() - base;
    header.codes_begin = region.bytes() / 2;
    header.codes_end = model.codes.end() - base;
    bool codes = header.codes_end > header.codes_begin;
    header.bytes = round_up(codes ? header.codes_end : header.end, 4096);
    std::memcpy(base, &header, sizeof header);
    collapse(base, base + header.end);
    collapse(base + header.codes_begin, base + header.codes_end);
    set_size(region.file(), header.bytes);
    region.freeze();
}

void map_weights(DiptychModel &model, int file) {
    if (model.region.base() != nullptr || model.head.data != nullptr) {
        throw std::runtime_error("the model has weights already");
    }
    int64_t bytes = size_of(file);
    if (bytes < kHeaderBytes) throw std::runtime_error("the file of shared weights is cut short");
    model.region.map(file, bytes, false);
    char *base = model.region.base();
    Header header, own{};
    std::memcpy(&header, base, sizeof header);
    name_kernels(own.kernels, model);
    if (header.magic != kMagic || header.abi != DIPTYCH_ABI_VERSION || header.bytes != bytes) {
        throw std::runtime_error("the file of shared weights is of another version");
    }
    if (std::memcmp(&header.shape, &model.shape, sizeof model.shape) != 0) {
        throw std::runtime_error("the shared weights are of another shape");
    }
    if (std::memcmp(header.kernels, own.kernels, sizeof own.kernels) != 0) {
        throw std::runtime_error("the shared weights are of another instruction set");
    }
    if (header.directory < kHeaderBytes || header.directory_bytes < 0 ||
        header.directory + header.directory_bytes > header.end || header.end > bytes) {
        throw std::runtime_error("the directory of shared weights is broken");
    }
    populate(base, base + header.end);
    if (header.codes_end > header.codes_begin) populate(base + header.codes_begin, base + header.codes_end);
    DirectoryReader reader(base, header);
    exchange(reader, model);
    model.step->recurrent.page = page_bytes(model);
    model.embeds_from_head = header.embeds_from_head != 0;
    model.own_embedding = header.embedding == 0 ? nullptr : base + header.embedding;
    model.embedding = model.own_embedding;
}

}  // namespace diptych
