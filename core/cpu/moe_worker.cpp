#include "cpu/moe_worker.h"

#include <algorithm>

namespace glm53::cpu {
namespace {

float total(const float* values, int64_t count) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += values[i];
    return sum;
}

void multiply(const Kernels& kernels, const ExpertMatrix& matrix, Gemv gemv) {
    gemv.trellis = matrix.trellis;
    kernels.gemv[matrix.bits - kMinBits](&gemv);
}

}  // namespace

void Prepared::reserve(const Kernels& kernels, int64_t slots, int64_t channels) {
    const size_t count = static_cast<size_t>(slots * channels);
    values.reserve(count * static_cast<size_t>(kernels.words_per_value));
    bias.reserve(count / kBlock);
    scale.reserve(count / kBlock);
    offset.reserve(count / kBlock);
}

Activations Prepared::view(const Kernels& kernels, int64_t channels, int64_t slot, int rows) const {
    return {values.data() + slot * channels * kernels.words_per_value, bias.data() + slot * (channels / kBlock),
            scale.data() + slot * (channels / kBlock), channels, rows == 1};
}

void PreparedInput::reserve(const Kernels& kernels, int64_t slots, int64_t hidden) {
    gate.reserve(kernels, slots, hidden);
    up.reserve(kernels, slots, hidden);
}

void PreparedInput::quantise(const Kernels& kernels, const ExpertTable& table, const MoePlan::Group& group,
                             int64_t first, int row, int block, const float* x) {
    const Expert& expert = table[group.expert];
    Activations to_gate = gate.view(kernels, table.hidden(), first, group.rows);
    Activations to_up = up.view(kernels, table.hidden(), first, group.rows);
    const int64_t at = (first + row) * (table.hidden() / kBlock) + block;
    gate.offset.data()[at] = kernels.quantise(x, expert.gate.suh + block * kBlock, &to_gate, row, block);
    up.offset.data()[at] = kernels.quantise(x, expert.up.suh + block * kBlock, &to_up, row, block);
}

void MoeWorker::reserve(const Kernels& kernels, const ExpertTable& table) {
    down_.reserve(kernels, kMaxRows, table.intermediate());
    gate_.reserve(static_cast<size_t>(kMaxRows) * static_cast<size_t>(table.intermediate()));
    up_.reserve(static_cast<size_t>(kMaxRows) * static_cast<size_t>(table.intermediate()));
    y_.reserve(static_cast<size_t>(kMaxRows) * static_cast<size_t>(table.hidden()));
}

// Gate, up and SwiGLU of the slices, rounded for down; each row's share of down's offset goes to offsets (rows).
void MoeWorker::activate(const Kernels& kernels, const ExpertTable& table, const MoePlan::Group& group,
                         MoePlan::Slices slices, const PreparedInput& input, int64_t first, float* offsets) {
    const Expert& expert = table[group.expert];
    const int hidden = table.hidden(), inter = table.intermediate(), hidden_blocks = hidden / kBlock;
    const int width = (slices.end - slices.begin) * kBlock;
    for (const bool is_gate : {true, false}) {
        float* y = (is_gate ? gate_ : up_).data();
        for (int r = 0; r < group.rows; ++r) std::fill_n(y + r * inter + slices.begin * kBlock, width, 0.0f);
        const Activations x = (is_gate ? input.gate : input.up).view(kernels, hidden, first, group.rows);
        multiply(kernels, is_gate ? expert.gate : expert.up,
                 {nullptr, inter / 16, slices.begin * kBlockTiles, slices.end * kBlockTiles, 0, hidden_blocks,
                  group.rows, x, y, inter});
    }
    Activations down = down_.view(kernels, inter, 0, group.rows);
    for (int r = 0; r < group.rows; ++r) {
        const int64_t blocks_before = (first + r) * hidden_blocks;
        const float gate_offset = total(input.gate.offset.data() + blocks_before, hidden_blocks);
        const float up_offset = total(input.up.offset.data() + blocks_before, hidden_blocks);
        for (int b = slices.begin; b < slices.end; ++b) {
            float* gate = gate_.data() + r * inter + b * kBlock;
            float* up = up_.data() + r * inter + b * kBlock;
            kernels.rotate_out(gate, gate_offset, expert.gate.svh + b * kBlock);
            kernels.rotate_out(up, up_offset, expert.up.svh + b * kBlock);
            kernels.swiglu(gate, up, table.limit());
            offsets[r] += kernels.quantise(gate, expert.down.suh + b * kBlock, &down, r, b);
        }
    }
}

void MoeWorker::add_slices(const Kernels& kernels, const ExpertTable& table, const MoePlan& plan,
                           const MoePlan::Group& group, MoePlan::Slices slices, const PreparedInput& input,
                           int64_t first, const float* weights, int64_t top_k, float* sum) {
    const Expert& expert = table[group.expert];
    const int hidden = table.hidden();
    float offsets[kMaxRows] = {};
    activate(kernels, table, group, slices, input, first, offsets);
    float* y = y_.data();
    std::fill_n(y, group.rows * hidden, 0.0f);
    multiply(kernels, expert.down,
             {nullptr, hidden / 16, 0, hidden / 16, slices.begin, slices.end, group.rows,
              down_.view(kernels, table.intermediate(), 0, group.rows), y, hidden});
    for (int r = 0; r < group.rows; ++r) {
        const int64_t pick = plan.order()[static_cast<size_t>(group.first + r)];
        const float weight = weights[pick];
        float* target = sum + pick / top_k * hidden;
        float* source = y + r * hidden;
        for (int b = 0; b < hidden / kBlock; ++b) {
            kernels.rotate_out(source + b * kBlock, offsets[r], expert.down.svh + b * kBlock);
        }
        for (int i = 0; i < hidden; ++i) target[i] += weight * source[i];
    }
}

}  // namespace glm53::cpu
