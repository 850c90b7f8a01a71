#include "cache/lane_link.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/half.h"
#include "cpu/kernels.h"
#include "cpu/lane_block.h"

namespace glm53 {
namespace {

using cpu::LaneVerdict;

constexpr std::size_t kPage = 4096;
constexpr std::chrono::milliseconds kLongestWait{60'000};

void check_split(const SplitConfig& split) {
    if (const char* error = split_config_error(split)) {
        throw std::invalid_argument(std::string("ExpertRuntime: ") + error);
    }
}

void check_lane(const HostArena& arena, bool cuda, int hidden, std::chrono::milliseconds limit) {
    if (hidden < cpu::kBlock || hidden % cpu::kBlock || arena.bytes() < cpu::lane_block_bytes(hidden)) {
        throw std::invalid_argument("ExpertRuntime: an arena of " + std::to_string(arena.bytes()) +
                                    " bytes is not a CPU lane's of hidden size " + std::to_string(hidden));
    }
    if (arena.state() == ArenaState::Sealed)
        throw std::invalid_argument("ExpertRuntime: the CPU lane's arena is sealed");
    if (cuda && !arena.device_address()) {
        throw std::invalid_argument("ExpertRuntime: the CPU lane's arena is not page-locked");
    }
    if (limit.count() < 1 || limit > kLongestWait) {
        throw std::invalid_argument("ExpertRuntime: the CPU lane's limit must be 1 to " +
                                    std::to_string(kLongestWait.count()) + " ms, not " + std::to_string(limit.count()));
    }
}

}  // namespace

LaneLink::LaneLink(std::shared_ptr<Device> device, HostArena& arena, int hidden, const SplitConfig& split,
                   std::chrono::milliseconds limit)
    : device_((check_split(split), check_lane(arena, device->is_cuda(), hidden, limit), std::move(device))),
      arena_(arena),
      hidden_(hidden),
      limit_(limit),
      status_(kPage, "CPU lane status", device_),
      split_(split) {
    if (!device_->is_cuda()) {
        publisher_.emplace(arena_.data(), hidden_);
        return;
    }
    LaneDeviceState state;
    state.published = cpu::lane_last_job(arena_.data(), hidden_);
    state.split = split;
    state_ = static_cast<LaneDeviceState*>(device_->alloc(sizeof state));
    try {
        device_->copy_async(state_, &state, sizeof state, nullptr);
        device_->stream_synchronize(nullptr);
    } catch (...) {
        device_->free(state_);
        throw;
    }
}

LaneLink::~LaneLink() {
    if (state_) device_->free(state_);
}

LaneStepView LaneLink::view() const {
    return {arena_.device_address(), hidden_, state_, static_cast<std::uint32_t*>(status_.device_address()),
            static_cast<std::uint64_t>(std::chrono::nanoseconds(limit_).count())};
}

void LaneLink::set_split(const SplitConfig& split, StreamHandle stream) {
    check_split(split);
    split_ = split;
    if (!state_) return;
    device_->copy_async(&state_->split, &split_, sizeof split_, stream);
    device_->stream_synchronize(stream);
}

int LaneLink::admission_limit(int max_admissions) const {
    return open() ? std::min(max_admissions, split_.max_admissions) : max_admissions;
}

void LaneLink::step(const ExpertStepView& experts, const LaneStepJob& job, int max_admissions, StreamHandle stream) {
    drop(stream);
    launch_split_step(experts, view(), job, max_admissions, stream);
    due_rows_ = job.rows;
}

void LaneLink::step(ClockStep step, ClockScratch clock, const AwayRow& away, const LaneStepJob& job) {
    drop(nullptr);
    due_rows_ = job.rows;
    if (!open()) return;
    SplitStep split;
    SplitScratch scratch;
    split_staged(away, step, clock, SerialLanes{});
    split_step(split_, step, clock, split, scratch, SerialLanes{});
    if (split.cpu == 0) return;
    std::int32_t picks[cpu::kLanePicks];
    float weights[cpu::kLanePicks];
    std::vector<float> x(static_cast<std::size_t>(job.rows) * static_cast<std::size_t>(hidden_));
    auto* routing = static_cast<std::uint16_t*>(job.weights);
    for (int i = 0; i < job.rows * job.top_k; ++i) {
        const int u = step.unique_of[i];
        const bool here = u >= 0 && split.on_cpu[u];
        picks[i] = here ? step.expert[u] : cpu::kSkippedPick;
        weights[i] = here ? half_to_float(routing[i]) : 0.0f;
        if (here) routing[i] = 0;
    }
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = half_to_float(static_cast<const std::uint16_t*>(job.x)[i]);
    publisher_->publish({job.layer, job.rows, job.top_k, picks, weights, x.data()});
    pending_ = true;
    counts_.experts += static_cast<std::uint64_t>(split.cpu);
    counts_.steps += 1;
}

void LaneLink::add(int rows, void* out, bool half, StreamHandle stream) {
    if (!due_rows_) return;
    if (rows != due_rows_) {
        throw std::invalid_argument("ExpertRuntime: the last split step had " + std::to_string(due_rows_) +
                                    " rows, not " + std::to_string(rows));
    }
    take(rows, out, half, stream);
}

void LaneLink::drop(StreamHandle stream) {
    if (due_rows_) take(0, nullptr, false, stream);
}

void LaneLink::take(int rows, void* out, bool half, StreamHandle stream) {
    if (!state_) {
        take_on_host(rows, out, half);
    } else if (half) {
        launch_lane_add_half(view(), rows, out, stream);
    } else {
        launch_lane_add(view(), rows, static_cast<float*>(out), stream);
    }
    due_rows_ = 0;
}

void LaneLink::take_on_host(int rows, void* out, bool half) {
    if (!pending_) return;
    pending_ = false;
    LaneVerdict verdict = publisher_->await(limit_);
    if (verdict == LaneVerdict::kPending) verdict = LaneVerdict::kStalled;
    if (verdict != LaneVerdict::kOk) {
        std::atomic_ref(status()).store(static_cast<std::uint32_t>(verdict), std::memory_order_release);
        return;
    }
    const float* sum = publisher_->result();
    for (std::size_t i = 0; i < static_cast<std::size_t>(rows) * static_cast<std::size_t>(hidden_); ++i) {
        if (half) {
            auto& value = static_cast<std::uint16_t*>(out)[i];
            value = float_to_half(half_to_float(value) + sum[i]);
        } else {
            static_cast<float*>(out)[i] += sum[i];
        }
    }
}

void LaneLink::close(StreamHandle stream) {
    drop(stream);
    device_->stream_synchronize(stream);
}

LaneVerdict LaneLink::verdict() const {
    const std::uint32_t word = std::atomic_ref(status()).load(std::memory_order_acquire);
    return word ? static_cast<LaneVerdict>(word) : LaneVerdict::kOk;
}

LaneCounts LaneLink::counts(StreamHandle stream) const {
    if (!state_) return counts_;
    LaneDeviceState state;
    device_->copy_async(&state, state_, sizeof state, stream);
    device_->stream_synchronize(stream);
    return {state.cpu_experts, state.cpu_steps};
}

}  // namespace glm53
