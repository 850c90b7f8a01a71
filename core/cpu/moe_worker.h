// The arithmetic of a routed expert, in pieces that any thread may run: rounding of a row's blocks, and a group's
// slices added into fp32 rows. CpuMoe and CpuLane share it, so their results differ in nothing but the order of sums.
//
// States: scratch that grows to the largest call. Threads: one object belongs to one thread at a time; a PreparedInput
// may be filled by several, each its own blocks. Costs: no allocation once reserved.
#pragma once
#include <cstdint>

#include "common/aligned_buffer.h"
#include "cpu/expert_table.h"
#include "cpu/kernels.h"
#include "cpu/moe_plan.h"

namespace glm53::cpu {

// Rounded activations of some slots for one matrix.
struct Prepared {
    AlignedBuffer<int16_t> values;
    AlignedBuffer<int32_t> bias;
    AlignedBuffer<float> scale;
    AlignedBuffer<float> offset;  // (slots, blocks)

    void reserve(const Kernels& kernels, int64_t slots, int64_t channels);
    // Of `rows` consecutive slots, row 0 being slot `slot`.
    Activations view(const Kernels& kernels, int64_t channels, int64_t slot, int rows) const;
};

// x of some slots, rotated and rounded for gate and up.
struct PreparedInput {
    Prepared gate, up;

    void reserve(const Kernels& kernels, int64_t slots, int64_t hidden);
    // Block `block` of row `row` of a group whose row 0 is slot `first`; x: that row's 128 channels.
    void quantise(const Kernels& kernels, const ExpertTable& table, const MoePlan::Group& group, int64_t first, int row,
                  int block, const float* x);
};

class MoeWorker {
  public:
    void reserve(const Kernels& kernels, const ExpertTable& table);

    // sum[pick / top_k] += weights[pick] * these slices' share of the expert, for the group's picks. input holds the
    // group's rows from slot `first` on; sum: (rows, hidden).
    void add_slices(const Kernels& kernels, const ExpertTable& table, const MoePlan& plan, const MoePlan::Group& group,
                    MoePlan::Slices slices, const PreparedInput& input, int64_t first, const float* weights,
                    int64_t top_k, float* sum);

  private:
    void activate(const Kernels& kernels, const ExpertTable& table, const MoePlan::Group& group, MoePlan::Slices slices,
                  const PreparedInput& input, int64_t first, float* offsets);

    Prepared down_;
    AlignedBuffer<float> gate_, up_;  // (kMaxRows, intermediate)
    AlignedBuffer<float> y_;          // (kMaxRows, hidden)
};

}  // namespace glm53::cpu
