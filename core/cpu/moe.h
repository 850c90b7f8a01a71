// CpuMoe: the routed experts of a mixture-of-experts layer on the CPU, straight from their EXL3 bytes.
//
//   out[row] = sum over the row's picks of weight * down(min(silu(gate(x)), limit) * clamp(up(x), -limit, limit))
//
// (exllamav3's clamp order; a table's limit 0 leaves both sides alone.) Picks are grouped by expert, so that an expert
// is decoded once for up to 8 rows that picked it (moe_plan.h); a row may leave any of its picks to another lane. The
// workers share an expert by columns and wait for each other only where one needs what others still make (moe_team.h).
//
// States: counters, and scratch that grows to the largest wave. Threads: forward() may be called from any thread;
// calls queue. Results are the same bit for bit from run to run, on any number of threads and in the CPU lane.
// Costs per call: one hand-over to the pool (none for work too small to share) for kPassRows rows, one meeting for each
// wave (moe_plan.h).
#pragma once
#include <cstdint>
#include <mutex>
#include <span>
#include <string_view>

#include "common/thread_pool.h"
#include "cpu/expert_table.h"
#include "cpu/kernels.h"
#include "cpu/moe_plan.h"
#include "cpu/moe_team.h"

namespace glm53::cpu {

struct MoeStats {
    uint64_t calls = 0;
    uint64_t rows = 0;
    uint64_t picks = 0;         // (row, expert) pairs served; skipped ones are not counted
    uint64_t expert_bytes = 0;  // trellis bytes decoded
    double seconds = 0;         // inside forward()
};

// One layer's routed input. All arrays are contiguous.
struct MoeCall {
    const float* x;        // (rows, hidden)
    const int64_t* picks;  // (rows, top_k) expert numbers
    const float* weights;  // (rows, top_k)
    float* out;            // (rows, hidden), overwritten; must not overlap x
    int64_t rows;
    int64_t top_k;
    bool ragged = false;  // kSkippedPick stands for a pick that adds nothing here; else it is an error like any other
};

class CpuMoe {
  public:
    static constexpr int64_t kPassRows = 256;

    // threads: 0 for one per physical core (or one per entry of cpus). cpus: pin one worker to each; empty for none.
    // isa: "auto" or a name that select_kernels() takes. Throws std::invalid_argument for what this machine lacks.
    CpuMoe(int threads, std::span<const int> cpus, std::string_view isa);

    // Throws, before anything is written, std::out_of_range for a pick that is neither in the table nor skipped,
    // and std::invalid_argument for an expert that is not complete.
    void forward(const ExpertTable& table, const MoeCall& call);

    MoeStats stats() const;
    const char* isa() const { return kernels_.name; }
    int threads() const { return pool_.size(); }

  private:
    void check(const ExpertTable& table, const MoeCall& call) const;
    void run_pass(const ExpertTable& table, const MoeCall& call);
    void compute(const ExpertTable& table, const MoeCall& call, int active);
    void meet(const MoePlan::Wave& wave, int active);
    template <class Job>
    void parallel(int active, Job job);

    const Kernels& kernels_;
    ThreadPool pool_;
    std::mutex forward_mutex_;
    MoePlan plan_;
    MoeTeam team_;
    MoeTeam::Count met_;   // workers that have done a wave
    MoeTeam::Count turn_;  // waves done by all
    mutable std::mutex stats_mutex_;
    MoeStats stats_;
};

}  // namespace glm53::cpu
