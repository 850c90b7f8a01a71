#include "cpu/lane_publisher.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>

namespace glm53::cpu {

std::uint32_t LanePublisher::publish(const LaneRequest& request) {
    if (ended_) throw std::logic_error("the CPU lane has ended");
    if (published_ - read_ >= 2) throw std::logic_error("two jobs of the CPU lane are outstanding already");
    const int picks = request.rows * request.top_k;
    if (request.rows < 0 || request.rows > kLaneRows || request.top_k < 0 || request.top_k > kLanePicks ||
        picks > kLanePicks) {
        throw std::invalid_argument("a job of " + std::to_string(request.rows) + " rows with " +
                                    std::to_string(request.top_k) + " picks does not fit the CPU lane");
    }
    const std::uint32_t job = published_ + 1;
    const LaneSlot slot = lane_slot(block_, hidden_, job);
    slot.job->layer = request.layer;
    slot.job->rows = request.rows;
    slot.job->top_k = request.top_k;
    std::copy_n(request.picks, picks, slot.job->picks);
    std::copy_n(request.weights, picks, slot.job->weights);
    std::copy_n(request.x, static_cast<std::size_t>(request.rows) * static_cast<std::size_t>(hidden_), slot.x);
    std::atomic_ref(slot.job->published).store(job, std::memory_order_release);
    published_ = job;
    return job;
}

LaneVerdict LanePublisher::poll() const {
    if (published_ == read_) return LaneVerdict::kPending;
    const std::uint32_t job = read_ + 1;
    const LaneSlot slot = lane_slot(block_, hidden_, job);
    return lane_verdict(std::atomic_ref(slot.done->word).load(std::memory_order_acquire), job);
}

LaneVerdict LanePublisher::await(std::chrono::milliseconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    LaneVerdict verdict;
    while ((verdict = poll()) == LaneVerdict::kPending) {
        if (std::chrono::steady_clock::now() >= end) return verdict;
        std::this_thread::yield();
    }
    ++read_;
    ended_ = ended_ || verdict == LaneVerdict::kStalled || verdict == LaneVerdict::kDied;
    return verdict;
}

const float* LanePublisher::result() const {
    return lane_slot(block_, hidden_, read_).result;
}

}  // namespace glm53::cpu
