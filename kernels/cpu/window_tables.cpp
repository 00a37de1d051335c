#include "window_tables.h"

#include <algorithm>

namespace diptych {

std::string refused_windows(const DiptychModel &model, const DiptychBatch &batch, int32_t s, const int32_t *table) {
    if (batch.windowed == 0) return "";
    std::string where = "sequence " + std::to_string(s) + ": ";
    int64_t first = batch.window_firsts[s], count = batch.window_lengths[s], size = batch.block_size;
    int64_t end = static_cast<int64_t>(batch.starts[s]) + batch.counts[s];
    if (first < 0 || count < 0 || first + count < (end + size - 1) / size) {
        return where + std::to_string(count) + " windowed blocks from " + std::to_string(first) + " on";
    }
    for (int32_t layer = 0; layer < model.shape.layers; layer++) {
        const Layer &of = model.layers[static_cast<size_t>(layer)];
        if (batch.layer_places[2 * layer] == 0 || !of.own.attention) continue;
        int64_t window = of.own.window;
        int64_t read = window == 0 ? 0 : std::max<int64_t>(0, batch.starts[s] + 1 - window) / size;
        if (first > read) {
            return where + "layer " + std::to_string(layer) + " reads block " + std::to_string(read) +
                   ", windowed ones begin at " + std::to_string(first);
        }
    }
    for (int64_t i = 0; i < window_entries(batch, s); i++) {
        if (table[i] < 0 || table[i] >= batch.memory_blocks[s]) {
            return where + "windowed block " + std::to_string(table[i]) + " of " +
                   std::to_string(batch.memory_blocks[s]);
        }
    }
    return "";
}

std::string refused_layer_places(const DiptychModel &model, const DiptychBatch &batch) {
    if (batch.windowed < 0 || (batch.windowed > 0 && batch.layer_places == nullptr)) return "windowed tables of no layer";
    if (batch.layer_places == nullptr) return "";
    for (int32_t layer = 0; layer < model.shape.layers; layer++) {
        int32_t table = batch.layer_places[2 * layer], slot = batch.layer_places[2 * layer + 1];
        if (table < 0 || table > batch.windowed || slot < 0 || slot >= model.shape.layers) {
            return "layer " + std::to_string(layer) + " in table " + std::to_string(table) + ", place " +
                   std::to_string(slot);
        }
    }
    return "";
}

int32_t block_layers(const DiptychModel &model, const DiptychBatch &batch) {
    if (batch.layer_places == nullptr) return model.shape.layers;
    int32_t last = 0;
    for (int32_t layer = 0; layer < model.shape.layers; layer++) {
        last = std::max(last, batch.layer_places[2 * layer + 1]);
    }
    return last + 1;
}

void add_window_tables(StepState &step) {
    const DiptychBatch &batch = step.batch;
    auto sequences = static_cast<size_t>(batch.sequences);
    step.tables.resize(sequences * static_cast<size_t>(1 + batch.windowed));
    const int32_t *table = batch.window_tables;
    for (size_t s = 0; s < sequences && batch.windowed > 0; s++) {
        for (int32_t t = 1; t <= batch.windowed; t++) {
            step.tables[static_cast<size_t>(t) * sequences + s] = table - batch.window_firsts[s];
            table += batch.window_lengths[s];
        }
    }
}

}  // namespace diptych
