#include "cpu/moe_team.h"

#include <algorithm>

#include "common/relax.h"

namespace glm53::cpu {
namespace {

// Some 50 us: a thread that gives way on a busy machine may not be back for milliseconds.
constexpr int kPauses = 1000;
constexpr int kPairTiles = kPairColumns / 16;

// In eight running sums, so that it takes no chain of `count` additions.
float total(const float* values, int64_t count) {
    const int64_t whole = count / 8 * 8;
    float sum = 0.0f;
    for (int64_t i = whole; i < count; ++i) sum += values[i];
    if (whole == 0) return sum;
    float sums[8] = {};
    for (int64_t i = 0; i < whole; i += 8) {
        for (int lane = 0; lane < 8; ++lane) sums[lane] += values[i + lane];
    }
    for (const float part : sums) sum += part;
    return sum;
}

// For every block that units [begin, end) of a line of whole blocks touch: its number, and how many of its tiles.
template <class Each>
void each_block(int begin, int end, Each each) {
    constexpr int kPairs = kBlock / kPairColumns;
    for (int block = begin / kPairs; block * kPairs < end; ++block) {
        each(block, kPairTiles * (std::min(end, (block + 1) * kPairs) - std::max(begin, block * kPairs)));
    }
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

void Prepared::quantise(const Kernels& kernels, const ExpertMatrix& matrix, int64_t channels, int64_t slot, int rows,
                        int row, int block, const float* x) {
    Activations to = view(kernels, channels, slot, rows);
    offset.data()[(slot + row) * (channels / kBlock) + block] =
        kernels.quantise(x, matrix.suh + block * kBlock, &to, row, block);
}

float Prepared::total_offset(int64_t channels, int64_t slot) const {
    return total(offset.data() + slot * (channels / kBlock), channels / kBlock);
}

void MoeTeam::reserve(const Kernels& kernels, const ExpertTable& table, int slots) {
    const int64_t hidden = table.hidden(), inter = table.intermediate();
    gate_input_.reserve(kernels, slots, hidden);
    up_input_.reserve(kernels, slots, hidden);
    down_input_.reserve(kernels, slots, inter);
    gate_.reserve(static_cast<size_t>(slots * inter));
    up_.reserve(static_cast<size_t>(slots * inter));
    y_.reserve(static_cast<size_t>(slots * hidden));
    const auto grow = [](std::vector<Count>& counts, int64_t size) {
        if (std::ssize(counts) < size) counts = std::vector<Count>(static_cast<size_t>(size));
    };
    grow(ready_, slots);
    grow(block_, slots * (inter / kBlock));
    grow(out_block_, hidden / kBlock);
}

void MoeTeam::reset(const MoePlan::Wave& wave) {
    for (Count* count : {&next_input_, &next_gate_up_, &next_down_, &prepared_}) {
        count->value.store(0, std::memory_order_relaxed);
    }
    for (int g = 0; g < wave.end - wave.begin; ++g)
        ready_[static_cast<size_t>(g)].value.store(0, std::memory_order_relaxed);
}

bool MoeTeam::wait(const Count& count, int64_t wanted, MoeWaiter& waiter) {
    const auto reached = [&] { return count.value.load(std::memory_order_acquire) >= wanted; };
    if (reached()) return true;
    waiter.waits(true);
    do {
        for (int i = 0; i < kPauses; ++i) {
            if (reached()) {
                waiter.waits(false);
                return true;
            }
            relax();
        }
    } while (waiter.goes_on());
    return false;
}

bool MoeTeam::fill(Count& count, int64_t more, int64_t full) {
    if (count.value.fetch_add(more, std::memory_order_acq_rel) + more < full) return false;
    count.value.store(0, std::memory_order_relaxed);
    return true;
}

bool MoeTeam::work(const Kernels& kernels, const MoeWave& wave, MoeWaiter& waiter) {
    prepare(kernels, wave);
    if (!wait(prepared_, int64_t{wave.wave.slots} * (wave.table.hidden() / kBlock), waiter)) return false;
    gate_up(kernels, wave);
    return down(kernels, wave, waiter);
}

void MoeTeam::prepare(const Kernels& kernels, const MoeWave& w) {
    const int64_t all = int64_t{w.wave.slots} * (w.table.hidden() / kBlock);
    const int64_t size = (all + 2 * w.workers - 1) / (2 * w.workers);
    int64_t done = 0;
    for (;;) {
        const int64_t begin = next_input_.value.fetch_add(1, std::memory_order_relaxed) * size;
        if (begin >= all) break;
        const int64_t end = std::min(begin + size, all);
        quantise(kernels, w, begin, end);
        done += end - begin;
    }
    if (done) prepared_.value.fetch_add(done, std::memory_order_release);
}

// Blocks [begin, end) of the wave's input, slot by slot.
void MoeTeam::quantise(const Kernels& kernels, const MoeWave& w, int64_t begin, int64_t end) {
    const int64_t hidden = w.table.hidden(), blocks = hidden / kBlock;
    for (int g = w.wave.begin; g < w.wave.end; ++g) {
        const MoePlan::Group& group = w.plan.groups()[static_cast<size_t>(g)];
        const Expert& expert = w.table[group.expert];
        const int64_t slot = group.first - w.wave.first, base = slot * blocks;
        for (int64_t i = std::max(begin, base); i < std::min(end, base + group.rows * blocks); ++i) {
            const int row = static_cast<int>((i - base) / blocks);
            const int block = static_cast<int>((i - base) % blocks);
            const int64_t source = w.plan.order()[static_cast<size_t>(group.first + row)] / w.top_k;
            const float* x = w.x + source * hidden + block * kBlock;
            gate_input_.quantise(kernels, expert.gate, hidden, slot, group.rows, row, block, x);
            up_input_.quantise(kernels, expert.up, hidden, slot, group.rows, row, block, x);
        }
    }
}

// Runs of gate's and up's columns, as long as there are some to take.
void MoeTeam::gate_up(const Kernels& kernels, const MoeWave& w) {
    const int half = w.table.intermediate() / kPairColumns;
    for (;;) {
        const int64_t ticket = next_gate_up_.value.fetch_add(1, std::memory_order_relaxed);
        const MoePlan::Range share = MoePlan::share(w.wave, 2 * half, ticket, w.workers);
        if (share.begin == share.end) return;
        for (int g = w.wave.begin; g < w.wave.end; ++g) {
            const MoePlan::Group& group = w.plan.groups()[static_cast<size_t>(g)];
            const MoePlan::Range units = w.plan.units(w.wave, group, 2 * half, share);
            const int begin = static_cast<int>(units.begin), end = static_cast<int>(units.end);
            if (begin < std::min(end, half)) multiply_half(kernels, w, g, false, begin, std::min(end, half));
            if (std::max(begin, half) < end)
                multiply_half(kernels, w, g, true, std::max(begin, half) - half, end - half);
        }
    }
}

// Units [begin, end) of a group's gate or up, and the blocks that they complete.
void MoeTeam::multiply_half(const Kernels& kernels, const MoeWave& w, int g, bool is_up, int begin, int end) {
    const MoePlan::Group& group = w.plan.groups()[static_cast<size_t>(g)];
    const ExpertMatrix& matrix = is_up ? w.table[group.expert].up : w.table[group.expert].gate;
    const Prepared& input = is_up ? up_input_ : gate_input_;
    const int64_t hidden = w.table.hidden(), inter = w.table.intermediate(), slot = group.first - w.wave.first;
    float* y = (is_up ? up_ : gate_).data() + slot * inter;
    for (int r = 0; r < group.rows; ++r) {
        std::fill_n(y + r * inter + begin * kPairColumns, (end - begin) * kPairColumns, 0.0f);
    }
    const Gemv gemv{matrix.trellis,
                    static_cast<int>(inter / 16),
                    begin * kPairTiles,
                    end * kPairTiles,
                    0,
                    static_cast<int>(hidden / kBlock),
                    group.rows,
                    input.view(kernels, hidden, slot, group.rows),
                    y,
                    inter};
    kernels.gemv[matrix.bits - kMinBits](&gemv);
    const int64_t blocks = inter / kBlock, at = (g - w.wave.begin) * blocks;
    each_block(begin, end, [&](int block, int tiles) {
        if (fill(block_[static_cast<size_t>(at + block)], tiles, 2 * kBlockTiles)) activate(kernels, w, g, block);
    });
}

// SwiGLU of one block of a group's intermediate channels, rounded for down.
void MoeTeam::activate(const Kernels& kernels, const MoeWave& w, int g, int block) {
    const MoePlan::Group& group = w.plan.groups()[static_cast<size_t>(g)];
    const Expert& expert = w.table[group.expert];
    const int64_t hidden = w.table.hidden(), inter = w.table.intermediate(), slot = group.first - w.wave.first;
    for (int r = 0; r < group.rows; ++r) {
        float* gate = gate_.data() + (slot + r) * inter + block * kBlock;
        float* up = up_.data() + (slot + r) * inter + block * kBlock;
        kernels.rotate_out(gate, gate_input_.total_offset(hidden, slot + r), expert.gate.svh + block * kBlock);
        kernels.rotate_out(up, up_input_.total_offset(hidden, slot + r), expert.up.svh + block * kBlock);
        kernels.swiglu(gate, up, w.table.limit());
        down_input_.quantise(kernels, expert.down, inter, slot, group.rows, r, block, gate);
    }
    ready_[static_cast<size_t>(g - w.wave.begin)].value.fetch_add(1, std::memory_order_release);
}

bool MoeTeam::down(const Kernels& kernels, const MoeWave& w, MoeWaiter& waiter) {
    const int units_of_group = w.table.hidden() / kPairColumns;
    for (;;) {
        const int64_t ticket = next_down_.value.fetch_add(1, std::memory_order_relaxed);
        const MoePlan::Range share = MoePlan::share(w.wave, units_of_group, ticket, w.workers);
        if (share.begin == share.end) return true;
        for (int g = w.wave.begin; g < w.wave.end; ++g) {
            const MoePlan::Group& group = w.plan.groups()[static_cast<size_t>(g)];
            const MoePlan::Range units = w.plan.units(w.wave, group, units_of_group, share);
            if (units.begin == units.end) continue;
            if (!wait(ready_[static_cast<size_t>(g - w.wave.begin)], w.table.intermediate() / kBlock, waiter))
                return false;
            multiply_down(kernels, w, group, static_cast<int>(units.begin), static_cast<int>(units.end));
        }
    }
}

// Units [begin, end) of a group's down, and the blocks of out that they complete.
void MoeTeam::multiply_down(const Kernels& kernels, const MoeWave& w, const MoePlan::Group& group, int begin, int end) {
    const ExpertMatrix& matrix = w.table[group.expert].down;
    const int64_t hidden = w.table.hidden(), inter = w.table.intermediate(), slot = group.first - w.wave.first;
    float* y = y_.data() + slot * hidden;
    for (int r = 0; r < group.rows; ++r) {
        std::fill_n(y + r * hidden + begin * kPairColumns, (end - begin) * kPairColumns, 0.0f);
    }
    const Gemv gemv{matrix.trellis,
                    static_cast<int>(hidden / 16),
                    begin * kPairTiles,
                    end * kPairTiles,
                    0,
                    static_cast<int>(inter / kBlock),
                    group.rows,
                    down_input_.view(kernels, inter, slot, group.rows),
                    y,
                    hidden};
    kernels.gemv[matrix.bits - kMinBits](&gemv);
    each_block(begin, end, [&](int block, int tiles) {
        const int64_t full = int64_t{w.wave.end - w.wave.begin} * kBlockTiles;
        if (fill(out_block_[static_cast<size_t>(block)], tiles, full)) finish(kernels, w, block);
    });
}

// One block of out: the wave's slots, in their order.
void MoeTeam::finish(const Kernels& kernels, const MoeWave& w, int block) {
    const int64_t hidden = w.table.hidden(), inter = w.table.intermediate();
    if (w.wave.first == 0) {
        for (int64_t row = 0; row < w.rows; ++row) std::fill_n(w.out + row * hidden + block * kBlock, kBlock, 0.0f);
    }
    for (int g = w.wave.begin; g < w.wave.end; ++g) {
        const MoePlan::Group& group = w.plan.groups()[static_cast<size_t>(g)];
        const uint16_t* svh = w.table[group.expert].down.svh + block * kBlock;
        for (int r = 0; r < group.rows; ++r) {
            const int64_t slot = group.first - w.wave.first + r;
            const int64_t pick = w.plan.order()[static_cast<size_t>(group.first + r)];
            const float weight = w.weights[pick];
            float* source = y_.data() + slot * hidden + block * kBlock;
            float* target = w.out + pick / w.top_k * hidden + block * kBlock;
            kernels.rotate_out(source, down_input_.total_offset(inter, slot), svh);
            for (int i = 0; i < kBlock; ++i) target[i] += weight * source[i];
        }
    }
}

}  // namespace glm53::cpu
