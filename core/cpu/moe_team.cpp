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

// Takes shares of a line of work whose groups have `units` units each, as long as there are some to take, and gives
// each(group, begin, end) those of every group. False as soon as one such call is.
template <class Each>
bool take_shares(MoeTeam::Count& next, const MoeJob& job, int units, Each each) {
    for (;;) {
        const int64_t ticket = next.value.fetch_add(1, std::memory_order_relaxed);
        const MoePlan::Range share = MoePlan::share(job.wave, units, ticket, job.workers);
        if (share.begin == share.end) return true;
        for (int g = job.wave.begin; g < job.wave.end; ++g) {
            const MoePlan::Range mine = job.plan.units(job.wave, job.group(g), units, share);
            if (mine.begin == mine.end) continue;
            if (!each(g, static_cast<int>(mine.begin), static_cast<int>(mine.end))) return false;
        }
    }
}

// A matrix of k inputs and n outputs, and what it is multiplied with for all slots of a wave.
struct Product {
    const ExpertMatrix& matrix;
    const Prepared& input;  // (slots, k)
    int64_t k, n;
    float* y;  // (slots, n)
};

// Units [begin, end) of y for a group's slots, before the rotation.
void multiply(const MoeJob& job, const MoePlan::Group& group, const Product& product, int begin, int end) {
    const int64_t slot = job.slot(group), n = product.n;
    float* y = product.y + slot * n;
    for (int r = 0; r < group.rows; ++r) {
        std::fill_n(y + r * n + begin * kPairColumns, (end - begin) * kPairColumns, 0.0f);
    }
    const Gemv gemv{product.matrix.trellis,
                    static_cast<int>(n / 16),
                    begin * kPairTiles,
                    end * kPairTiles,
                    0,
                    static_cast<int>(product.k / kBlock),
                    group.rows,
                    product.input.view(job.kernels, product.k, slot, group.rows),
                    y,
                    n};
    job.kernels.gemv[product.matrix.bits - kMinBits](&gemv);
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

bool MoeTeam::work(const MoeJob& job, MoeWaiter& waiter) {
    prepare(job);
    if (!wait(prepared_, int64_t{job.wave.slots} * (job.table.hidden() / kBlock), waiter)) return false;
    gate_up(job);
    return down(job, waiter);
}

void MoeTeam::prepare(const MoeJob& job) {
    const int64_t all = int64_t{job.wave.slots} * (job.table.hidden() / kBlock);
    const int64_t size = (all + 2 * job.workers - 1) / (2 * job.workers);
    int64_t done = 0;
    for (;;) {
        const int64_t begin = next_input_.value.fetch_add(1, std::memory_order_relaxed) * size;
        if (begin >= all) break;
        const int64_t end = std::min(begin + size, all);
        quantise(job, begin, end);
        done += end - begin;
    }
    if (done) prepared_.value.fetch_add(done, std::memory_order_release);
}

// Blocks [begin, end) of the wave's input, slot by slot.
void MoeTeam::quantise(const MoeJob& job, int64_t begin, int64_t end) {
    const int64_t hidden = job.table.hidden(), blocks = hidden / kBlock;
    for (int g = job.wave.begin; g < job.wave.end; ++g) {
        const MoePlan::Group& group = job.group(g);
        const Expert& expert = job.table[group.expert];
        const int64_t slot = job.slot(group), base = slot * blocks;
        for (int64_t i = std::max(begin, base); i < std::min(end, base + group.rows * blocks); ++i) {
            const int row = static_cast<int>((i - base) / blocks);
            const int block = static_cast<int>((i - base) % blocks);
            const int64_t source = job.plan.order()[static_cast<size_t>(group.first + row)] / job.top_k;
            const float* x = job.x + source * hidden + block * kBlock;
            gate_input_.quantise(job.kernels, expert.gate, hidden, slot, group.rows, row, block, x);
            up_input_.quantise(job.kernels, expert.up, hidden, slot, group.rows, row, block, x);
        }
    }
}

// Runs of gate's and up's columns, as long as there are some to take.
void MoeTeam::gate_up(const MoeJob& job) {
    const int half = job.table.intermediate() / kPairColumns;
    take_shares(next_gate_up_, job, 2 * half, [&](int g, int begin, int end) {
        if (begin < half) multiply_half(job, g, false, begin, std::min(end, half));
        if (end > half) multiply_half(job, g, true, std::max(begin, half) - half, end - half);
        return true;
    });
}

// Units [begin, end) of a group's gate or up, and the blocks that they complete.
void MoeTeam::multiply_half(const MoeJob& job, int g, bool is_up, int begin, int end) {
    const MoePlan::Group& group = job.group(g);
    const Expert& expert = job.table[group.expert];
    const int64_t hidden = job.table.hidden(), inter = job.table.intermediate();
    const Product gate{expert.gate, gate_input_, hidden, inter, gate_.data()};
    const Product up{expert.up, up_input_, hidden, inter, up_.data()};
    multiply(job, group, is_up ? up : gate, begin, end);
    const int64_t at = (g - job.wave.begin) * (inter / kBlock);
    each_block(begin, end, [&](int block, int tiles) {
        if (fill(block_[static_cast<size_t>(at + block)], tiles, 2 * kBlockTiles)) activate(job, g, block);
    });
}

// SwiGLU of one block of a group's intermediate channels, rounded for down.
void MoeTeam::activate(const MoeJob& job, int g, int block) {
    const MoePlan::Group& group = job.group(g);
    const Expert& expert = job.table[group.expert];
    const int64_t hidden = job.table.hidden(), inter = job.table.intermediate(), slot = job.slot(group);
    for (int r = 0; r < group.rows; ++r) {
        float* gate = gate_.data() + (slot + r) * inter + block * kBlock;
        float* up = up_.data() + (slot + r) * inter + block * kBlock;
        job.kernels.rotate_out(gate, gate_input_.total_offset(hidden, slot + r), expert.gate.svh + block * kBlock);
        job.kernels.rotate_out(up, up_input_.total_offset(hidden, slot + r), expert.up.svh + block * kBlock);
        job.kernels.swiglu(gate, up, job.table.limit());
        down_input_.quantise(job.kernels, expert.down, inter, slot, group.rows, r, block, gate);
    }
    ready_[static_cast<size_t>(g - job.wave.begin)].value.fetch_add(1, std::memory_order_release);
}

bool MoeTeam::down(const MoeJob& job, MoeWaiter& waiter) {
    const int64_t blocks = job.table.intermediate() / kBlock;
    return take_shares(next_down_, job, job.table.hidden() / kPairColumns, [&](int g, int begin, int end) {
        if (!wait(ready_[static_cast<size_t>(g - job.wave.begin)], blocks, waiter)) return false;
        multiply_down(job, job.group(g), begin, end);
        return true;
    });
}

// Units [begin, end) of a group's down, and the blocks of out that they complete.
void MoeTeam::multiply_down(const MoeJob& job, const MoePlan::Group& group, int begin, int end) {
    const ExpertMatrix& matrix = job.table[group.expert].down;
    multiply(job, group, {matrix, down_input_, job.table.intermediate(), job.table.hidden(), y_.data()}, begin, end);
    each_block(begin, end, [&](int block, int tiles) {
        const int64_t full = int64_t{job.wave.end - job.wave.begin} * kBlockTiles;
        if (fill(out_block_[static_cast<size_t>(block)], tiles, full)) finish(job, block);
    });
}

// One block of out: the wave's slots, in their order.
void MoeTeam::finish(const MoeJob& job, int block) {
    const int64_t hidden = job.table.hidden(), inter = job.table.intermediate();
    if (job.wave.first == 0) {
        for (int64_t row = 0; row < job.rows; ++row) std::fill_n(job.out + row * hidden + block * kBlock, kBlock, 0.0f);
    }
    for (int g = job.wave.begin; g < job.wave.end; ++g) {
        const MoePlan::Group& group = job.group(g);
        const uint16_t* svh = job.table[group.expert].down.svh + block * kBlock;
        for (int r = 0; r < group.rows; ++r) {
            const int64_t slot = job.slot(group) + r;
            const int64_t pick = job.plan.order()[static_cast<size_t>(group.first + r)];
            const float weight = job.weights[pick];
            float* source = y_.data() + slot * hidden + block * kBlock;
            float* target = job.out + pick / job.top_k * hidden + block * kBlock;
            job.kernels.rotate_out(source, down_input_.total_offset(inter, slot), svh);
            for (int i = 0; i < kBlock; ++i) target[i] += weight * source[i];
        }
    }
}

}  // namespace glm53::cpu
