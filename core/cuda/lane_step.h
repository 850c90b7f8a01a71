// Kernels at the GPU's end of the CPU lane (cpu/lane_block.h): one writes a job, one waits for its sum and adds it.
//
// NOT IN USE: no engine launches these yet, and they have been compiled (sm_86, sm_90) but never run. tests/core/
// test_lane_step_cuda.cpp is the test to run on a machine with a GPU before anything relies on them:
//   cmake --preset cuda -DGLM53_TESTS=ON && cmake --build --preset cuda && build/cuda/tests/core/test_lane_step_cuda
//
// On one stream, per MoE layer of a decode step: [decide and split] -> publish -> [the experts' own kernels] -> add.
// The host waits for nothing; whether a step failed is one word of mapped memory that it reads when it reads the token.
// States    LaneDeviceState, in device memory, changed by these kernels alone: the job numbers are there, so that a
//           captured graph can be launched again. `verdict` leaves kOk for good with the first job that is not kOk;
//           that step's output must not be used, and from then on nothing is published: every pick stays on the GPU.
// Order     a slot is written again two jobs later, by a kernel behind the one that read its result (lane_block.h, 4).
// Costs     publish: one block, rows * hidden * 4 bytes written over PCIe. add: one block that polls one word over
// PCIe,
//           then reads as many bytes.
#pragma once
#include <cstdint>

#include "cpu/lane_block.h"
#include "device/device.h"

namespace glm53 {

struct LaneDeviceState {
    std::uint32_t published = 0;  // number of the last job
    std::uint32_t pending = 0;    // the job that add waits for; 0: the last publish had nothing for the CPU
    std::uint32_t verdict = static_cast<std::uint32_t>(cpu::LaneVerdict::kOk);
    std::uint32_t reserved = 0;
};

struct LaneStepView {
    void* block;             // the device's alias of the shared block
    int hidden;              // channels, a multiple of 128
    LaneDeviceState* state;  // on the device, initialised to LaneDeviceState{}
    std::uint32_t* status;   // mapped host memory: a copy of state->verdict once it is not kOk
    std::uint64_t limit_ns;  // how long add waits; longer than the lane's own limit
};

// One step's picks of a layer, all on the device.
struct LaneStepJob {
    int layer, rows, top_k;      // rows <= kLaneRows, rows * top_k <= kLanePicks
    std::int64_t* picks;         // (rows, top_k); those that go to the CPU are overwritten with `diverted`
    const std::int32_t* on_cpu;  // (rows, top_k) 1 for a pick that goes to the CPU
    const void* weights;         // (rows, top_k) fp16
    const void* x;               // (rows, hidden) fp16
    std::int64_t diverted;       // an id that the experts' kernels count as zero
};

void launch_lane_publish(const LaneStepView& view, const LaneStepJob& job, StreamHandle stream);

// out += the CPU's sum, if the last publish had picks for the CPU. out: (rows, hidden) floats, or fp16.
void launch_lane_add(const LaneStepView& view, int rows, float* out, StreamHandle stream);
void launch_lane_add_half(const LaneStepView& view, int rows, void* out, StreamHandle stream);

}  // namespace glm53
