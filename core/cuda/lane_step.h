// Kernels at the GPU's end of the CPU lane (cpu/lane_block.h): one decides a step and gives the CPU its part, one waits
// for the CPU's sum and adds it.
//
// On one stream, per MoE layer of a decode step: split step -> copies of what was admitted -> [the experts' own
// kernels] -> add. The host waits for nothing; whether a step failed is one word of mapped memory that it reads when it
// reads the token.
// Diverted picks  keep their ids and lose their routing weights: exllamav3 1.5.1's decode kernels skip a pick of weight
//           0 before they look its expert up (slot_info in quant/exl3_moe_coop_kernel.cuh), and give a row without any
//           active pick zeros or the shared expert's output. An id beyond the experts would not do: with all experts on
//           the GPU (min_expert -1) they do not check it.
// States    LaneDeviceState, in device memory, changed by these kernels and, between passes, by the host: the job
//           numbers are there, so that a captured graph can be launched again. `verdict` leaves kOk for good with the
//           first job that is not kOk; that step's output must not be used, and from then on nothing is published:
//           every pick stays on the GPU.
// Order     a slot is written again two jobs later, by a kernel behind the one that read its result (lane_block.h, 4).
//           The rows go there while the step is still being decided: nobody reads a slot that is not published.
// Costs     split step: one block; rows * hidden * 4 bytes over PCIe beside the policy's few microseconds. add: one
//           block that polls one word over PCIe, then reads as many bytes.
#pragma once
#include <cstdint>

#include "cache/split.h"
#include "cpu/lane_block.h"
#include "cuda/expert_step.h"
#include "device/device.h"

namespace glm53 {

struct LaneDeviceState {
    std::uint32_t published = 0;  // number of the last job, which wraps
    std::uint32_t pending = 0;    // 1: add waits for that job; 0: the last step had nothing for the CPU
    std::uint32_t verdict = static_cast<std::uint32_t>(cpu::LaneVerdict::kOk);
    std::uint32_t reserved = 0;
    SplitConfig split;
    std::uint64_t cpu_experts = 0;  // distinct experts of a step that went to the CPU
    std::uint64_t cpu_steps = 0;    // steps that had any
};

struct LaneStepView {
    void* block;             // the device's alias of the shared block
    int hidden;              // channels, a multiple of 128
    LaneDeviceState* state;  // on the device
    std::uint32_t* status;   // mapped host memory: a copy of state->verdict once it is not kOk
    std::uint64_t limit_ns;  // how long add waits; longer than the lane's own limit
};

// One step's picks of a layer, all on the device.
struct LaneStepJob {
    int layer, rows, top_k;     // rows <= kLaneRows, rows * top_k <= kLanePicks
    const std::int64_t* picks;  // (rows, top_k)
    void* weights;              // (rows, top_k) fp16; 0 is written over those of the picks that go to the CPU
    const void* x;              // (rows, hidden) fp16, 16-byte aligned
};

// clock_step, split_step, the tables and the job; launch_copy_admitted is to follow if max_admissions > 0.
// std::invalid_argument for a job that does not fit, DeviceFailure when the launch is refused.
void launch_split_step(const ExpertStepView& view, const LaneStepView& lane, const LaneStepJob& job, int max_admissions,
                       StreamHandle stream);

// out += the CPU's sum, if the last step had picks for the CPU. out: (rows, hidden) floats or fp16, 16-byte aligned.
// With rows 0 the sum is waited for and dropped.
void launch_lane_add(const LaneStepView& lane, int rows, float* out, StreamHandle stream);
void launch_lane_add_half(const LaneStepView& lane, int rows, void* out, StreamHandle stream);

}  // namespace glm53
