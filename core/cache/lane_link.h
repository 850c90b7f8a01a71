// LaneLink: an ExpertRuntime's end of an attached CPU lane (cpu/lane_block.h). On a CUDA device the kernels of
// cuda/lane_step.h do the work; on the host device the calling thread does, through a LanePublisher.
//
// States    open -> ended, for good, with the first job whose verdict is not kOk: nothing is published any more.
//           From a step to add or drop its sum is due; a new step drops one that still is.
// Threads   the runtime's; verdict() from any thread.
// Costs     an arena of the least size for one word of status, 100 bytes on the device. On CUDA nothing waits but the
//           constructor, set_split, counts and close. On the host add waits for the sum.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "cache/split.h"
#include "cpu/lane_block.h"
#include "cpu/lane_publisher.h"
#include "cuda/lane_step.h"
#include "memory/host_arena.h"

namespace glm53 {

struct LaneCounts {
    std::uint64_t experts = 0;  // distinct experts of a step that the CPU computed
    std::uint64_t steps = 0;    // steps that had any
};

class LaneLink {
  public:
    // See ExpertRuntime::attach_lane.
    LaneLink(std::shared_ptr<Device> device, HostArena& arena, int hidden, const SplitConfig& split,
             std::chrono::milliseconds limit);
    ~LaneLink();  // close() first
    LaneLink(const LaneLink&) = delete;
    LaneLink& operator=(const LaneLink&) = delete;

    void set_split(const SplitConfig& split, StreamHandle stream);
    // Misses that the next step may admit, of `max_admissions`; the kernels see to it themselves.
    int admission_limit(int max_admissions) const;
    // CUDA: decides and publishes. The caller queues launch_copy_admitted behind it.
    void step(const ExpertStepView& view, const LaneStepJob& job, int max_admissions, StreamHandle stream);
    // Host: publishes the CPU's part of a step that clock_step has just decided.
    void step(ClockStep step, ClockScratch clock, const AwayRow& away, const LaneStepJob& job);
    // rows: the step's. Does nothing when no sum is due.
    void add(int rows, void* out, bool half, StreamHandle stream);
    void drop(StreamHandle stream);
    void close(StreamHandle stream);  // waits for what was queued
    cpu::LaneVerdict verdict() const;
    LaneCounts counts(StreamHandle stream) const;

  private:
    bool open() const { return verdict() == cpu::LaneVerdict::kOk && split_.max_cpu > 0; }
    LaneStepView view() const;
    std::uint32_t& status() const { return *reinterpret_cast<std::uint32_t*>(status_.data()); }
    void take(int rows, void* out, bool half, StreamHandle stream);
    void take_on_host(int rows, void* out, bool half);

    const std::shared_ptr<Device> device_;
    HostArena& arena_;
    const int hidden_;
    const std::chrono::milliseconds limit_;
    HostArena status_;                  // one word: the verdict once it is not kOk, else 0
    int due_rows_ = 0;                  // of the step whose sum is due
    LaneDeviceState* state_ = nullptr;  // CUDA
    // host device
    SplitConfig split_;
    std::optional<cpu::LanePublisher> publisher_;
    bool pending_ = false;  // a job is outstanding
    LaneCounts counts_;
};

}  // namespace glm53
