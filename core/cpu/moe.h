// CpuMoe: the routed experts of a mixture-of-experts layer on the CPU, straight from their EXL3 bytes.
//
//   out[row] = sum over the row's picks of weight * down(min(silu(gate(x)), limit) * clamp(up(x), -limit, limit))
//
// (exllamav3's clamp order; a table's limit 0 leaves both sides alone.) Picks are grouped by expert, so that an expert
// is decoded once for up to 8 rows that picked it. The unit of work is (expert, up to 8 rows, 128 intermediate
// channels): gate and up for those channels, the activation, and their share of down. No barrier lies inside an expert;
// each worker takes one contiguous run of units and adds their results into its own fp32 rows, summed once at the end.
//
// States: counters, and scratch that grows to the largest call. Threads: forward() may be called from any thread;
// calls queue. Results are the same bit for bit from run to run for one thread count, instruction set and input;
// another thread count sums the same terms in another order (fp32 rounding, about 1e-7 of the result).
// Costs per call: three hand-overs to the pool (none for work too small to share), one reduction of
// (threads - 1, rows, hidden) floats. More than kPassRows rows run in passes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "common/aligned_buffer.h"
#include "common/thread_pool.h"
#include "cpu/expert_table.h"
#include "cpu/kernels.h"

namespace glm53::cpu {

struct MoeStats {
    uint64_t calls = 0;
    uint64_t rows = 0;
    uint64_t picks = 0;         // (row, expert) pairs served
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
};

class CpuMoe {
  public:
    static constexpr int64_t kPassRows = 256;

    // threads: 0 for one per physical core (or one per entry of cpus). cpus: pin one worker to each; empty for none.
    // isa: "auto" or a name that select_kernels() takes. Throws std::invalid_argument for what this machine lacks.
    CpuMoe(int threads, std::span<const int> cpus, std::string_view isa);

    // Throws, before anything is written, std::out_of_range for a pick outside the table and std::invalid_argument for
    // an expert that is not complete.
    void forward(const ExpertTable& table, const MoeCall& call);

    MoeStats stats() const;
    const char* isa() const { return kernels_.name; }
    int threads() const { return pool_.size(); }

  private:
    // Up to kMaxRows picks of one expert: slots [first, first + rows) of order_.
    struct Group {
        int expert;
        int rows;
        int64_t first;
        int64_t cost_begin;  // units before this group, weighted
    };
    // Activations of every slot for one matrix.
    struct Prepared {
        AlignedBuffer<int16_t> values;
        AlignedBuffer<int32_t> bias;
        AlignedBuffer<float> scale;
        AlignedBuffer<float> offset;  // (slots, blocks)
    };
    struct Worker {
        Prepared down;
        AlignedBuffer<float> gate, up;  // (kMaxRows, intermediate)
        AlignedBuffer<float> y;         // (kMaxRows, hidden)
        AlignedBuffer<float> sum;       // (pass rows, hidden); worker 0 sums in the caller's out
    };

    void check(const ExpertTable& table, const MoeCall& call) const;
    void run_pass(const ExpertTable& table, const MoeCall& call);
    void plan(const ExpertTable& table, const MoeCall& call);
    void reserve(const ExpertTable& table, const MoeCall& call, int active);
    void prepare(const ExpertTable& table, const MoeCall& call, int worker, int active);
    void compute(const ExpertTable& table, const MoeCall& call, int worker, int active);
    void compute_slices(const ExpertTable& table, const MoeCall& call, const Group& group, int begin, int end,
                        Worker& scratch, float* sum);
    void reduce(const ExpertTable& table, const MoeCall& call, int worker, int active);
    template <class Job>
    void parallel(int active, Job job);
    void multiply(const ExpertMatrix& matrix, Gemv gemv) const;
    Activations view(const Prepared& prepared, int64_t channels, int64_t slot, int rows) const;
    void reserve(Prepared& prepared, int64_t slots, int64_t channels) const;

    const Kernels& kernels_;
    ThreadPool pool_;
    std::mutex forward_mutex_;
    std::vector<Worker> workers_;
    Prepared gate_, up_;
    std::vector<int64_t> order_;  // pick indices (row * top_k + i), by expert, then by row
    std::vector<int64_t> starts_;
    std::vector<Group> groups_;
    int64_t total_cost_ = 0;
    uint64_t pass_bytes_ = 0;
    mutable std::mutex stats_mutex_;
    MoeStats stats_;
};

}  // namespace glm53::cpu
