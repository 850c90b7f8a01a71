#include "cpu/moe.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "common/cpu_info.h"
#include "cpu/dispatch.h"

namespace glm53::cpu {
namespace {

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
    uint64_t picks = 0;
    for (int64_t row = 0; row < call.rows; row += kPassRows) {
        MoeCall pass = call;
        pass.x += row * table.hidden();
        pass.picks += row * call.top_k;
        pass.weights += row * call.top_k;
        pass.out += row * table.hidden();
        pass.rows = std::min(kPassRows, call.rows - row);
        run_pass(table, pass);
        bytes += plan_.bytes();
        picks += plan_.order().size();
    }
    const std::lock_guard stats_lock(stats_mutex_);
    stats_.calls += 1;
    stats_.rows += static_cast<uint64_t>(call.rows);
    stats_.picks += picks;
    stats_.expert_bytes += bytes;
    stats_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void CpuMoe::check(const ExpertTable& table, const MoeCall& call) const {
    if (call.rows < 0 || call.top_k < 0) throw std::invalid_argument("negative number of rows or picks");
    for (int64_t i = 0; i < call.rows * call.top_k; ++i) {
        const int64_t pick = call.picks[i];
        if (call.ragged && pick == kSkippedPick) continue;
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
    plan_.build(table, call.picks, call.rows * call.top_k);
    const int active = plan_.workers(pool_.size());
    reserve(table, call, active);
    parallel(active, [&](int worker) { prepare(table, call, worker, active); });
    parallel(active, [&](int worker) { compute(table, call, worker, active); });
    if (active > 1) parallel(active, [&](int worker) { reduce(table, call, worker, active); });
}

void CpuMoe::reserve(const ExpertTable& table, const MoeCall& call, int active) {
    input_.reserve(kernels_, std::ssize(plan_.order()), table.hidden());
    for (int worker = 0; worker < active; ++worker) {
        Worker& scratch = workers_[static_cast<size_t>(worker)];
        scratch.moe.reserve(kernels_, table);
        if (worker > 0) scratch.sum.reserve(static_cast<size_t>(call.rows * table.hidden()));
    }
}

// Rotates and rounds x for the gate and up of every pick: the blocks of all groups, dealt out evenly.
void CpuMoe::prepare(const ExpertTable& table, const MoeCall& call, int worker, int active) {
    const int64_t blocks = table.hidden() / kBlock;
    const int64_t all = std::ssize(plan_.order()) * blocks;
    const int64_t begin = all * worker / active;
    const int64_t end = all * (worker + 1) / active;
    for (const MoePlan::Group& group : plan_.groups()) {
        const int64_t base = group.first * blocks;
        for (int64_t i = std::max(begin, base); i < std::min(end, base + group.rows * blocks); ++i) {
            const int row = static_cast<int>((i - base) / blocks);
            const int block = static_cast<int>((i - base) % blocks);
            const int64_t source = plan_.order()[static_cast<size_t>(group.first + row)] / call.top_k;
            const float* x = call.x + source * table.hidden() + block * kBlock;
            input_.quantise(kernels_, table, group, group.first, row, block, x);
        }
    }
}

void CpuMoe::compute(const ExpertTable& table, const MoeCall& call, int worker, int active) {
    Worker& scratch = workers_[static_cast<size_t>(worker)];
    float* sum = worker == 0 ? call.out : scratch.sum.data();
    std::fill_n(sum, call.rows * table.hidden(), 0.0f);
    for (const MoePlan::Group& group : plan_.groups()) {
        const MoePlan::Slices slices = plan_.slices(group, worker, active);
        if (slices.begin < slices.end) {
            scratch.moe.add_slices(kernels_, table, plan_, group, slices, input_, group.first, call.weights, call.top_k,
                                   sum);
        }
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
