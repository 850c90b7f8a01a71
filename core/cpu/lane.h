// CpuLane: persistent workers that compute the misses a decode step leaves to the CPU, straight from the experts' one
// copy in host memory. Jobs come and results go through a shared block (lane_block.h has its layout and the ordering);
// whoever publishes never calls into this object.
//
// States of a worker   spinning on the next job's `published` (for `spin` and, where wake() was called, for `spin`
//                      more; then parked on a futex) -> taking its part
//                      in the job, share by share until nothing is left to take (moe_team.h) -> finished. There is no
//                      barrier: each makes the plan itself, and waits only for what it needs and others still make.
// States of the lane   serving -> failed (kStalled, kDied), for good: build a new one. A bad job fails alone.
// Who decides          decided_ holds the last decided job's word. It moves from job j - 1 to j by compare-and-swap, by
//                      the last worker to finish or by whoever notices a failure, and only the winner writes `done`.
// Threads   `threads` workers and one watchdog, which looks every `poll`: it wakes parked workers when a job is there,
//           and fails the lane when one is not done within `limit` (of running time: a process that was stopped for
//           a while finds its lane alive). wake(), health() and stats() from any thread.
// Costs     memory: the scratch of two jobs, 7 MB at hidden 4096 and intermediate 2048. Time of a job beside its
//           products: the line of `published` to every core; rounding x, SwiGLU and the sums, shared by all; and up to
//           three waits, for x, for the blocks between up and down, and for the last worker. A parked worker costs one
//           poll, unless wake() came first.
// Results   bit for bit those of CpuMoe, on any number of threads.
// Bad at    more workers than free cores: a job is done when the last of them has seen it.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cpu/expert_table.h"
#include "cpu/kernels.h"
#include "cpu/lane_block.h"
#include "cpu/moe_plan.h"
#include "cpu/moe_team.h"

namespace glm53::cpu {

struct LaneOptions {
    int threads = 0;        // 0: one per entry of cpus, or per physical core
    std::vector<int> cpus;  // one worker pinned to each; empty: not pinned
    std::string isa = "auto";
    std::chrono::microseconds spin{2000};  // longer than the GPU's part of a layer, so that a token finds them awake
    std::chrono::microseconds poll{1000};
    std::chrono::milliseconds limit{1500};
    // Called by every worker before its part of a job; it may throw or block. For tests.
    std::function<void(int worker, std::uint32_t job)> on_job;
};

struct LaneHealth {
    LaneVerdict verdict = LaneVerdict::kOk;  // kOk: serving
    std::uint32_t job = 0;                   // the job that failed
    int worker = -1;                         // the first worker that others waited for, or the one that threw
    std::string reason;
};

struct LaneStats {
    std::uint64_t jobs = 0, bad_jobs = 0;
    std::uint64_t picks = 0;         // (row, expert) pairs served
    std::uint64_t expert_bytes = 0;  // trellis bytes decoded
    std::uint64_t parks = 0;         // times a worker went to sleep
    int parked = 0;                  // workers asleep now
    double seconds = 0;              // from worker 0's sight of a job to the last worker's end of it
};

class CpuLane {
  public:
    // tables: one a MoE layer, all of one hidden size, complete where jobs will ask; they and `block` (at least
    // lane_block_bytes(hidden) bytes, 64-byte aligned, cleared here) outlive this object. Throws std::invalid_argument.
    CpuLane(std::vector<const ExpertTable*> tables, std::span<std::byte> block, LaneOptions options);
    ~CpuLane();  // waits for workers inside a job, also for a stalled one; a job that is left gets kDied
    CpuLane(const CpuLane&) = delete;
    CpuLane& operator=(const CpuLane&) = delete;

    // Ends and joins the workers; waits as the destructor does, which has nothing left to do then. Idempotent, but for
    // one thread; wake(), health() and stats() go on answering.
    void close() { stop(); }
    // Makes parked workers spin, and spinning ones go on for `spin` more: to be called when a step is about to be
    // queued. A few ns when all are awake.
    void wake();
    bool failed() const;
    LaneHealth health() const;
    LaneStats stats() const;
    int threads() const { return static_cast<int>(workers_.size()); }
    int hidden() const { return hidden_; }
    const char* isa() const { return kernels_.name; }

  private:
    class Waiter;
    struct alignas(64) Worker {
        MoePlan plan;
        std::atomic<std::uint64_t> arrived{0};  // the last job in which it has nothing to do now but to wait for others
        std::thread thread;
    };

    void work(int worker);
    bool await_job(std::uint64_t job);
    bool serve(int worker, std::uint64_t job);
    LaneVerdict check(const LaneJob& job) const;
    bool compute(int worker, const LaneSlot& slot, std::uint64_t job);
    void finish(int worker, LaneVerdict verdict, std::uint64_t job);
    bool published(std::uint64_t job) const;
    bool over() const;
    void decide(LaneVerdict verdict, std::uint64_t job);
    void fail(LaneVerdict verdict, std::uint64_t decided, int worker, const std::string& reason);
    void watch();
    void watch_job(std::uint64_t decided, std::chrono::nanoseconds waited);
    void stop();
    template <class Ready>
    bool spin(Ready ready, std::chrono::microseconds limit) const;

    const Kernels& kernels_;
    const std::vector<const ExpertTable*> tables_;
    const int hidden_;
    void* const block_;
    const LaneOptions options_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::thread watchdog_;

    MoeTeam teams_[2];                                // by parity of the job, as the slots
    std::chrono::steady_clock::time_point began_[2];  // when worker 0 saw the job
    MoeTeam::Count finished_[2];                      // workers that finished, over all jobs of a parity
    alignas(64) std::atomic<std::uint64_t> decided_;  // lane_done_word of the last decided job
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<std::uint32_t> bell_{0};
    std::atomic<std::uint32_t> parked_{0};
    std::atomic<std::uint64_t> jobs_{0}, bad_jobs_{0}, picks_{0}, bytes_{0}, nanoseconds_{0}, parks_{0};
    mutable std::mutex health_mutex_;
    LaneHealth health_;
};

}  // namespace glm53::cpu
