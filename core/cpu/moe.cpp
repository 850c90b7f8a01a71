#include "cpu/moe.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

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

// Gives way to whoever it waits for: there may be more workers than free cores.
class Patient final : public MoeWaiter {
  public:
    void waits(bool) override {}
    bool goes_on() override {
        std::this_thread::yield();
        return true;
    }
};

}  // namespace

CpuMoe::CpuMoe(int threads, std::span<const int> cpus, std::string_view isa)
    : kernels_(select_kernels(isa)), pool_(make_pool(threads, cpus)) {}

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
    if (plan_.waves().empty()) std::fill_n(call.out, call.rows * table.hidden(), 0.0f);
    int slots = 0;
    for (const MoePlan::Wave& wave : plan_.waves()) slots = std::max(slots, wave.slots);
    team_.reserve(kernels_, table, slots);
    const int active = plan_.workers(pool_.size());
    parallel(active, [&](int) { compute(table, call, active); });
}

void CpuMoe::compute(const ExpertTable& table, const MoeCall& call, int active) {
    Patient waiter;
    for (const MoePlan::Wave& wave : plan_.waves()) {
        team_.work({kernels_, table, plan_, wave, call.x, call.weights, call.top_k, call.out, call.rows, active},
                   waiter);
        meet(wave, active);
    }
}

// The last worker to come clears the way for the next wave; behind the last wave nobody waits for it.
void CpuMoe::meet(const MoePlan::Wave& wave, int active) {
    const int64_t turn = turn_.value.load(std::memory_order_relaxed);
    if (met_.value.fetch_add(1, std::memory_order_acq_rel) + 1 == active) {
        team_.reset(wave);
        met_.value.store(0, std::memory_order_relaxed);
        turn_.value.store(turn + 1, std::memory_order_release);
        return;
    }
    Patient waiter;
    if (&wave != &plan_.waves().back()) MoeTeam::wait(turn_, turn + 1, waiter);
}

}  // namespace glm53::cpu
