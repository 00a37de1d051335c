#include "state_pages.h"

#include <algorithm>
#include <cstring>

namespace diptych {

namespace {

constexpr int64_t kCountBytes = 64;  // that the count of tokens takes
constexpr int64_t kPieceBytes = 32 << 10;  // of a page that a rank copies at once

int64_t block_bytes(const StepState &step) {
    int64_t number = step.batch.kept == DIPTYCH_KV_INT8 ? 1 : step.model->shape.dtype == DIPTYCH_FP32 ? 4 : 2;
    return step.block_stride() * number;
}

// The page of a place of a sequence: its blocks, one in each windowed table.
struct Page {
    const StepState &step;
    int32_t sequence;
    int64_t place;

    int32_t block(int64_t number) const {
        int64_t table = (number + 1) * step.batch.sequences + sequence;
        return step.tables[static_cast<size_t>(table)][place];
    }

    bool operator==(const Page &other) const {
        for (int32_t i = 0; i < step.batch.windowed; i++) {
            if (block(i) != other.block(i)) return false;
        }
        return true;
    }

    // Calls f(address in the pool, offset in the page, bytes) for each stretch of the page's bytes begin .. end - 1.
    template <class F>
    void stretches(int64_t begin, int64_t end, F f) const {
        int64_t size = step.batch.page_block_bytes;
        while (begin < end) {
            int64_t number = begin / size, within = begin % size, bytes = std::min(size - within, end - begin);
            auto *base = reinterpret_cast<char *>(step.batch.memories[sequence]);
            f(base + block(number) * block_bytes(step) + within, begin, static_cast<size_t>(bytes));
            begin += bytes;
        }
    }

    int64_t count() const {
        int64_t found = 0;
        stretches(0, sizeof found, [&](const char *from, int64_t, size_t bytes) { std::memcpy(&found, from, bytes); });
        return found;
    }
};

// The page that a run leaves its states in.
Page page_of(const StepState &step, const PageRun &run) { return {step, run.sequence, run.place}; }

// Adds the runs of sequence s. States of a place whose page a later place has, too, are not kept.
void add_runs(StepState &step, int32_t s, int64_t first) {
    RecurrentStep &own = step.recurrent;
    int64_t size = step.batch.block_size, start = step.batch.starts[s], count = step.batch.counts[s];
    int64_t settled = step.batch.settled == nullptr ? count : step.batch.settled[s], end = start + settled;
    int64_t last = (end - 1) / size, at = start;
    own.begins.push_back(static_cast<int32_t>(own.runs.size()));
    for (int64_t place = start / size; place <= last; place++) {
        bool kept = true;
        for (int64_t later = place + 1; later <= last && kept; later++) kept = !(Page{step, s, place} == Page{step, s, later});
        if (!kept) continue;
        int64_t behind = std::min((place + 1) * size, end);
        own.runs.push_back({first + at - start, behind - at, s, place, behind, nullptr, nullptr});
        at = behind;
    }
    if (settled < count) own.runs.push_back({first + settled, count - settled, s, -1, start + count, nullptr, nullptr});
}

// Calls f(run, begin, end) for all bytes of the runs' pages from `begin` on, some of them on each rank.
template <class F>
void share_pages(StepState &step, int64_t count, int64_t begin, F f) {
    ThreadTeam &team = step.model->team;
    int64_t page = step.recurrent.page, pieces = (page - begin + kPieceBytes - 1) / kPieceBytes;
    auto tickets = team.even(count * pieces);
    for (auto run = team.take_run(tickets, 4); run.begin < run.end; run = team.take_run(tickets, 4)) {
        for (int64_t i = run.begin; i < run.end; i++) {
            int64_t from = begin + i % pieces * kPieceBytes;
            f(i / pieces, from, std::min(from + kPieceBytes, page));
        }
    }
}

}  // namespace

std::string refused_page_blocks(const DiptychModel &model, const DiptychBatch &batch) {
    int64_t page = model.step->recurrent.page;
    if (page == 0) return "";
    if (batch.page_block_bytes < kCountBytes || batch.layer_places == nullptr) return "the model's states have no pages";
    if (page > batch.page_block_bytes * batch.windowed) return "pages are smaller than the model's states";
    if (batch.block_stride == 0) return "blocks with pages have a size of their own";
    return batch.parents == nullptr ? "" : "recurrent layers know no trees of tokens";
}

std::string refused_pages(const DiptychModel &model, const DiptychBatch &batch, int32_t s) {
    if (model.step->recurrent.page == 0) return "";
    if (batch.settled != nullptr && (batch.settled[s] < 1 || batch.settled[s] > batch.counts[s])) {
        return "sequence " + std::to_string(s) + ": keeps the states behind " + std::to_string(batch.settled[s]) + " of " +
               std::to_string(batch.counts[s]) + " tokens";
    }
    int64_t read = std::max(0, batch.starts[s] - 1) / batch.block_size;
    if (batch.window_firsts[s] <= read) return "";
    return "sequence " + std::to_string(s) + ": reads the page of place " + std::to_string(read) + ", they begin at " +
           std::to_string(batch.window_firsts[s]);
}

void prepare_states(StepState &step) {
    RecurrentStep &own = step.recurrent;
    own.runs.clear();
    own.begins.clear();
    if (own.page == 0) return;
    int64_t first = 0;
    for (int32_t s = 0; s < step.batch.sequences; first += step.batch.counts[s++]) {
        add_runs(step, s, first);
        int64_t start = step.batch.starts[s];
        bool stale = start > 0 && Page{step, s, (start - 1) / step.batch.block_size}.count() != start;
        if (stale) step.live[static_cast<size_t>(s)] = 0;
        if (step.batch.stale != nullptr) step.batch.stale[s] = stale;
    }
    own.begins.push_back(static_cast<int32_t>(own.runs.size()));
    auto needed = static_cast<int64_t>(own.runs.size()) * own.page;
    if (needed > own.image_bytes) {
        own.image_bytes = 0;
        own.images = zeroed(needed + needed / 4);
        own.image_bytes = needed + needed / 4;
    }
    auto *image = static_cast<char *>(own.images.get());
    for (size_t i = 0; i < own.runs.size(); i++, image += own.page) {
        bool begins = i == 0 || own.runs[i - 1].sequence != own.runs[i].sequence;
        own.runs[i].image = image;
        own.runs[i].before = begins ? image : image - own.page;
    }
}

void read_states(StepState &step) {
    const RecurrentStep &own = step.recurrent;
    share_pages(step, step.batch.sequences, 0, [&](int64_t s, int64_t begin, int64_t end) {
        auto sequence = static_cast<int32_t>(s);
        char *to = own.runs[static_cast<size_t>(own.begins[static_cast<size_t>(s)])].before;
        int64_t start = step.batch.starts[s];
        if (start == 0) {
            std::memset(to + begin, 0, static_cast<size_t>(end - begin));
            return;
        }
        Page page{step, sequence, (start - 1) / step.batch.block_size};
        page.stretches(begin, end, [&](const char *from, int64_t at, size_t bytes) { std::memcpy(to + at, from, bytes); });
    });
    step.model->team.barrier();
}

void write_states(StepState &step) {
    const RecurrentStep &own = step.recurrent;
    auto runs = static_cast<int64_t>(own.runs.size());
    auto write = [&](int64_t i, int64_t begin, int64_t end, const char *content) {
        const PageRun &run = own.runs[static_cast<size_t>(i)];
        if (run.place < 0 || !step.live[static_cast<size_t>(run.sequence)]) return;
        page_of(step, run).stretches(begin, end, [&](char *to, int64_t at, size_t bytes) {
            std::memcpy(to, content + at - begin, bytes);
        });
    };
    share_pages(step, runs, kCountBytes, [&](int64_t i, int64_t begin, int64_t end) {
        write(i, begin, end, own.runs[static_cast<size_t>(i)].image + begin);
    });
    step.model->team.barrier();
    // Last: states of half a page are those of no token.
    auto tickets = step.model->team.even(1);
    for (auto run = step.model->team.take_run(tickets, 1); run.begin < run.end; run = step.model->team.take_run(tickets, 1)) {
        for (int64_t i = 0; i < runs; i++) {
            int64_t count = own.runs[static_cast<size_t>(i)].count;
            write(i, 0, sizeof count, reinterpret_cast<const char *>(&count));
        }
    }
}

}  // namespace diptych
