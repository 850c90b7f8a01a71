// LanePublisher: the publisher's side of lane_block.h on a host thread, the plain form of what a kernel does. It times
// the lane when an engine starts and in benchmarks, and stands for the kernels on the host device (lane_link.h).
//
// States: the numbers of the last published and the last read job; `ended` once a verdict that ends the lane was read.
// Threads: one. Costs: publish copies the rows; await spins.
#pragma once
#include <chrono>
#include <cstdint>

#include "cpu/lane_block.h"

namespace glm53::cpu {

// One step's job. picks hold kSkippedPick where another lane serves the pick.
struct LaneRequest {
    int layer;
    int rows, top_k;            // at most kLaneRows and kLanePicks in all
    const std::int32_t* picks;  // (rows, top_k)
    const float* weights;       // (rows, top_k)
    const float* x;             // (rows, hidden)
};

class LanePublisher {
  public:
    // `block` as the CpuLane that serves it has it, while no job is outstanding.
    LanePublisher(void* block, int hidden)
        : block_(block), hidden_(hidden), published_(lane_last_job(block, hidden)), read_(published_) {}

    // Returns the job's number. Throws std::logic_error when two jobs are outstanding or the lane has ended, and
    // std::invalid_argument for a request that does not fit the slot.
    std::uint32_t publish(const LaneRequest& request);
    // Verdict of the oldest outstanding job, kPending while there is none; a job stays outstanding until await.
    LaneVerdict poll() const;
    // Waits for the oldest outstanding job; kPending after `limit`. result() holds its sum if this is kOk.
    LaneVerdict await(std::chrono::milliseconds limit);
    int hidden() const { return hidden_; }
    // (rows, hidden) of the job that await returned last; valid until the job after the next is published.
    const float* result() const;

  private:
    void* const block_;
    const int hidden_;
    std::uint32_t published_, read_;
    bool ended_ = false;
};

}  // namespace glm53::cpu
