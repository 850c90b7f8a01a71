// MoeTeam: the arithmetic of a wave of routed experts (moe_plan.h), done by any number of workers at once. CpuMoe and
// CpuLane share it.
//
// A wave goes through these stages; nobody waits but where one needs what others still make.
//   input     the slots' x, rotated and rounded for gate and up    shared by tickets of a few blocks
//   gate, up                                                       shared by columns, once all input is there
//   block     SwiGLU of 128 channels, rounded for down             by whoever finished the block's last column
//   down                                                           shared by columns, once its group's blocks are there
//   output    128 channels of out: every slot's down, rotated,     by whoever finished the block's last column
//             weighted and added in the order of slots
//
// So each number is the result of one fixed order of operations, whoever computes it: results do not depend on the
// number of workers, bit for bit.
//
// States: counters, zero before a wave and again after reset(). Each worker of a wave calls work(); once all have come
// back and before the next wave, one calls reset(). A wave that was abandoned leaves the team unusable.
// Threads: work() from any number, all with the same job. Costs: memory for a wave's slots, nothing allocated
// after reserve(); per wave and worker a few atomic additions; waits spin.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

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
    // Block `block` of row `row` of a group of `rows` whose row 0 is slot `slot`; x: 128 channels.
    void quantise(const Kernels& kernels, const ExpertMatrix& matrix, int64_t channels, int64_t slot, int rows, int row,
                  int block, const float* x);
    float total_offset(int64_t channels, int64_t slot) const;
};

// What a worker does while it waits for others.
class MoeWaiter {
  public:
    virtual void waits(bool now) = 0;
    virtual bool goes_on() = 0;  // asked every 50 us or so; false: the wave is abandoned

  protected:
    ~MoeWaiter() = default;
};

// One wave of a call, as all its workers see it.
struct MoeJob {
    const Kernels& kernels;
    const ExpertTable& table;
    const MoePlan& plan;
    const MoePlan::Wave& wave;
    const float* x;        // (rows, hidden)
    const float* weights;  // (rows, top_k)
    int64_t top_k;
    float* out;  // (rows, hidden)
    int64_t rows;
    int workers;  // how many the wave is shared among

    const MoePlan::Group& group(int index) const { return plan.groups()[static_cast<size_t>(index)]; }
    int64_t slot(const MoePlan::Group& group) const { return group.first - wave.first; }  // its first, in the wave
};

class MoeTeam {
  public:
    struct alignas(64) Count {
        std::atomic<int64_t> value{0};
    };
    // Room for waves of `slots` picks. Not beside a wave.
    void reserve(const Kernels& kernels, const ExpertTable& table, int slots);
    // Takes part in a wave until nothing is left to take. The plan's first wave overwrites out, others add to it.
    // False if `waiter` gave up.
    bool work(const MoeJob& job, MoeWaiter& waiter);
    void reset(const MoePlan::Wave& wave);
    // Until a count has come so far; false if `waiter` gave up.
    static bool wait(const Count& count, int64_t wanted, MoeWaiter& waiter);

  private:
    void prepare(const MoeJob& job);
    void quantise(const MoeJob& job, int64_t begin, int64_t end);
    void gate_up(const MoeJob& job);
    void multiply_half(const MoeJob& job, int group, bool is_up, int begin, int end);
    void activate(const MoeJob& job, int group, int block);
    bool down(const MoeJob& job, MoeWaiter& waiter);
    void multiply_down(const MoeJob& job, const MoePlan::Group& group, int begin, int end);
    void finish(const MoeJob& job, int block);
    // Adds to a count that several fill up; true for the one that fills it, for whom it is zero again.
    static bool fill(Count& count, int64_t more, int64_t full);

    Prepared gate_input_, up_input_, down_input_;
    AlignedBuffer<float> gate_, up_;  // (slots, intermediate)
    AlignedBuffer<float> y_;          // (slots, hidden)
    Count next_input_, next_gate_up_, next_down_;
    Count prepared_;                // blocks of input
    std::vector<Count> ready_;      // by group of the wave: blocks ready for down
    std::vector<Count> block_;      // by group and block: tile columns of gate and up done
    std::vector<Count> out_block_;  // by block of out: tile columns of down done, over all groups
};

}  // namespace glm53::cpu
