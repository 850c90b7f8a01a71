#include "cpu/moe.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "common/cpu_info.h"
#include "cpu/dispatch.h"

namespace glm53::cpu {
namespace {

// Work below this is not worth waking another thread for.
constexpr uint64_t kBytesPerThread = 64 * 1024;
// Decoding a tile costs about four times what one more row of activations adds.
constexpr int64_t kDecodeCost = 4;

int64_t unit_cost(int rows) {
    return kDecodeCost + rows;
}

ThreadPool make_pool(int threads, std::span<const int> cpus) {
    if (threads < 0)
        throw std::invalid_argument("threads must be 0 (automatic) or more, not " + std::to_string(threads));
    if (!cpus.empty()) {
        if (threads != 0 && threads != std::ssize(cpus)) {
            throw std::invalid_argument(std::to_string(threads) + " threads for " + std::to_string(cpus.size()) +
                                        " CPUs: give one CPU per thread, or 0 threads");
        }
        return ThreadPool(cpus);
    }
    return ThreadPool(threads == 0 ? default_threads() : threads);
}

float total(const float* values, int64_t count) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += values[i];
    return sum;
}

}  // namespace

CpuMoe::CpuMoe(int threads, std::span<const int> cpus, std::string_view isa)
    : kernels_(select_kernels(isa)), pool_(make_pool(threads, cpus)), workers_(static_cast<size_t>(pool_.size())) {}

MoeStats CpuMoe::stats() const {
    const std::lock_guard lock(stats_mutex_);
    return stats_;
}

template <class Job>
void CpuMoe::parallel(int active, Job job) {
    if (active == 1) {
        job(0);
    } else {
        pool_.run([&](int worker) {
            if (worker < active) job(worker);
        });
    }
}

void CpuMoe::forward(const ExpertTable& table, const MoeCall& call) {
    const std::lock_guard lock(forward_mutex_);
    const auto begin = std::chrono::steady_clock::now();
    check(table, call);
    uint64_t bytes = 0;
    for (int64_t row = 0; row < call.rows; row += kPassRows) {
        MoeCall pass = call;
        pass.x += row * table.hidden();
        pass.picks += row * call.top_k;
        pass.weights += row * call.top_k;
        pass.out += row * table.hidden();
        pass.rows = std::min(kPassRows, call.rows - row);
        run_pass(table, pass);
        bytes += pass_bytes_;
    }
    const std::lock_guard stats_lock(stats_mutex_);
    stats_.calls += 1;
    stats_.rows += static_cast<uint64_t>(call.rows);
    stats_.picks += static_cast<uint64_t>(call.rows * call.top_k);
    stats_.expert_bytes += bytes;
    stats_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void CpuMoe::check(const ExpertTable& table, const MoeCall& call) const {
    if (call.rows < 0 || call.top_k < 0) throw std::invalid_argument("negative number of rows or picks");
    for (int64_t i = 0; i < call.rows * call.top_k; ++i) {
        const int64_t pick = call.picks[i];
        if (pick < 0 || pick >= table.experts()) {
            throw std::out_of_range("row " + std::to_string(i / call.top_k) + " picks expert " + std::to_string(pick) +
                                    " of " + std::to_string(table.experts()));
        }
        if (!table[static_cast<int>(pick)].complete()) {
            throw std::invalid_argument("expert " + std::to_string(pick) + " lacks gate, up or down");
        }
    }
}

void CpuMoe::run_pass(const ExpertTable& table, const MoeCall& call) {
    plan(table, call);
    const uint64_t shares = std::clamp<uint64_t>(pass_bytes_ / kBytesPerThread, 1, static_cast<uint64_t>(pool_.size()));
    const int active = static_cast<int>(shares);
    reserve(table, call, active);
    parallel(active, [&](int worker) { prepare(table, call, worker, active); });
    parallel(active, [&](int worker) { compute(table, call, worker, active); });
    if (active > 1) parallel(active, [&](int worker) { reduce(table, call, worker, active); });
}

// Counting sort of the picks by expert, then groups of at most kMaxRows, as equal as can be.
void CpuMoe::plan(const ExpertTable& table, const MoeCall& call) {
    const int64_t picks = call.rows * call.top_k;
    order_.resize(static_cast<size_t>(picks));
    starts_.assign(static_cast<size_t>(table.experts()) + 1, 0);
    for (int64_t i = 0; i < picks; ++i) ++starts_[static_cast<size_t>(call.picks[i]) + 1];
    for (size_t e = 1; e < starts_.size(); ++e) starts_[e] += starts_[e - 1];
    groups_.clear();
    total_cost_ = 0;
    pass_bytes_ = 0;
    const int64_t slices = table.intermediate() / kBlock;
    for (int e = 0; e < table.experts(); ++e) {
        const int64_t begin = starts_[static_cast<size_t>(e)];
        const int64_t count = starts_[static_cast<size_t>(e) + 1] - begin;
        const int64_t parts = (count + kMaxRows - 1) / kMaxRows;
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t first = begin + count * part / parts;
            const int rows = static_cast<int>(begin + count * (part + 1) / parts - first);
            groups_.push_back({e, rows, first, total_cost_});
            total_cost_ += unit_cost(rows) * slices;
            pass_bytes_ += table[e].trellis_bytes;
        }
    }
    for (int64_t i = 0; i < picks; ++i) order_[static_cast<size_t>(starts_[static_cast<size_t>(call.picks[i])]++)] = i;
}

void CpuMoe::reserve(Prepared& prepared, int64_t slots, int64_t channels) const {
    const size_t values = static_cast<size_t>(slots * channels);
    prepared.values.reserve(values * static_cast<size_t>(kernels_.words_per_value));
    prepared.bias.reserve(values / kBlock);
    prepared.scale.reserve(values / kBlock);
    prepared.offset.reserve(values / kBlock);
}

void CpuMoe::reserve(const ExpertTable& table, const MoeCall& call, int active) {
    const int64_t slots = std::ssize(order_);
    reserve(gate_, slots, table.hidden());
    reserve(up_, slots, table.hidden());
    for (int worker = 0; worker < active; ++worker) {
        Worker& scratch = workers_[static_cast<size_t>(worker)];
        reserve(scratch.down, kMaxRows, table.intermediate());
        scratch.gate.reserve(static_cast<size_t>(kMaxRows * table.intermediate()));
        scratch.up.reserve(static_cast<size_t>(kMaxRows * table.intermediate()));
        scratch.y.reserve(static_cast<size_t>(kMaxRows * table.hidden()));
        if (worker > 0) scratch.sum.reserve(static_cast<size_t>(call.rows * table.hidden()));
    }
}

// The activations of `rows` consecutive slots, row 0 being slot `slot`.
Activations CpuMoe::view(const Prepared& prepared, int64_t channels, int64_t slot, int rows) const {
    return {prepared.values.data() + slot * channels * kernels_.words_per_value,
            prepared.bias.data() + slot * (channels / kBlock), prepared.scale.data() + slot * (channels / kBlock),
            channels, rows == 1};
}

// Rotates and rounds x for the gate and up of every pick: the blocks of all groups, dealt out evenly.
void CpuMoe::prepare(const ExpertTable& table, const MoeCall& call, int worker, int active) {
    const int64_t blocks = table.hidden() / kBlock;
    const int64_t all = std::ssize(order_) * blocks;
    const int64_t begin = all * worker / active;
    const int64_t end = all * (worker + 1) / active;
    for (const Group& group : groups_) {
        const Expert& expert = table[group.expert];
        Activations gate = view(gate_, table.hidden(), group.first, group.rows);
        Activations up = view(up_, table.hidden(), group.first, group.rows);
        const int64_t base = group.first * blocks;
        for (int64_t i = std::max(begin, base); i < std::min(end, base + group.rows * blocks); ++i) {
            const int row = static_cast<int>((i - base) / blocks);
            const int block = static_cast<int>((i - base) % blocks);
            const int64_t source = order_[static_cast<size_t>(group.first + row)] / call.top_k;
            const float* x = call.x + source * table.hidden() + block * kBlock;
            gate_.offset.data()[i] = kernels_.quantise(x, expert.gate.suh + block * kBlock, &gate, row, block);
            up_.offset.data()[i] = kernels_.quantise(x, expert.up.suh + block * kBlock, &up, row, block);
        }
    }
}

// This worker's run of units: those whose cost begins in its share of the total.
void CpuMoe::compute(const ExpertTable& table, const MoeCall& call, int worker, int active) {
    Worker& scratch = workers_[static_cast<size_t>(worker)];
    float* sum = worker == 0 ? call.out : scratch.sum.data();
    std::fill_n(sum, call.rows * table.hidden(), 0.0f);
    const int64_t slices = table.intermediate() / kBlock;
    const int64_t begin = total_cost_ * worker / active;
    const int64_t end = total_cost_ * (worker + 1) / active;
    for (const Group& group : groups_) {
        const int64_t cost = unit_cost(group.rows);
        const auto first_at = [&](int64_t position) {  // the first slice that begins at or after a position
            return std::clamp<int64_t>((position - group.cost_begin + cost - 1) / cost, 0, slices);
        };
        const int64_t first = begin <= group.cost_begin ? 0 : first_at(begin);
        const int64_t last = end <= group.cost_begin ? 0 : first_at(end);
        if (first < last) {
            compute_slices(table, call, group, static_cast<int>(first), static_cast<int>(last), scratch, sum);
        }
    }
}

void CpuMoe::multiply(const ExpertMatrix& matrix, Gemv gemv) const {
    gemv.trellis = matrix.trellis;
    kernels_.gemv[matrix.bits - kMinBits](&gemv);
}

// Intermediate blocks [begin, end) of one group, added into `sum`.
void CpuMoe::compute_slices(const ExpertTable& table, const MoeCall& call, const Group& group, int begin, int end,
                            Worker& scratch, float* sum) {
    const Expert& expert = table[group.expert];
    const int hidden = table.hidden();
    const int inter = table.intermediate();
    const int hidden_blocks = hidden / kBlock;
    const int width = (end - begin) * kBlock;
    for (const bool is_gate : {true, false}) {
        float* y = (is_gate ? scratch.gate : scratch.up).data();
        for (int r = 0; r < group.rows; ++r) std::fill_n(y + r * inter + begin * kBlock, width, 0.0f);
        const Activations x = view(is_gate ? gate_ : up_, hidden, group.first, group.rows);
        multiply(is_gate ? expert.gate : expert.up, {nullptr, inter / 16, begin * kBlockTiles, end * kBlockTiles, 0,
                                                     hidden_blocks, group.rows, x, y, inter});
    }
    Activations down = view(scratch.down, inter, 0, group.rows);
    float offsets[kMaxRows] = {};
    for (int r = 0; r < group.rows; ++r) {
        const int64_t blocks_before = (group.first + r) * hidden_blocks;
        const float gate_offset = total(gate_.offset.data() + blocks_before, hidden_blocks);
        const float up_offset = total(up_.offset.data() + blocks_before, hidden_blocks);
        for (int b = begin; b < end; ++b) {
            float* gate = scratch.gate.data() + r * inter + b * kBlock;
            float* up = scratch.up.data() + r * inter + b * kBlock;
            kernels_.rotate_out(gate, gate_offset, expert.gate.svh + b * kBlock);
            kernels_.rotate_out(up, up_offset, expert.up.svh + b * kBlock);
            kernels_.swiglu(gate, up, table.limit());
            offsets[r] += kernels_.quantise(gate, expert.down.suh + b * kBlock, &down, r, b);
        }
    }
    float* y = scratch.y.data();
    std::fill_n(y, group.rows * hidden, 0.0f);
    multiply(expert.down, {nullptr, hidden / 16, 0, hidden / 16, begin, end, group.rows, down, y, hidden});
    for (int r = 0; r < group.rows; ++r) {
        const int64_t pick = order_[static_cast<size_t>(group.first + r)];
        const float weight = call.weights[pick];
        float* target = sum + pick / call.top_k * hidden;
        float* source = y + r * hidden;
        for (int b = 0; b < hidden_blocks; ++b) {
            kernels_.rotate_out(source + b * kBlock, offsets[r], expert.down.svh + b * kBlock);
        }
        for (int i = 0; i < hidden; ++i) target[i] += weight * source[i];
    }
}

// out += the other workers' sums, each worker over its share of the elements, always in worker order.
void CpuMoe::reduce(const ExpertTable& table, const MoeCall& call, int worker, int active) {
    const int64_t all = call.rows * table.hidden() / 16;
    const int64_t begin = all * worker / active * 16;
    const int64_t end = all * (worker + 1) / active * 16;
    for (int other = 1; other < active; ++other) {
        const float* sum = workers_[static_cast<size_t>(other)].sum.data();
        for (int64_t i = begin; i < end; ++i) call.out[i] += sum[i];
    }
}

}  // namespace glm53::cpu
