// ExpertRuntime's decode steps that share their misses with a CPU lane.
#include <stdexcept>
#include <string>

#include "cache/expert_runtime.h"
#include "cache/lane_link.h"

namespace glm53 {

void ExpertRuntime::attach_lane(HostArena& arena, int hidden, const SplitConfig& split,
                                std::chrono::milliseconds limit) {
    if (lane_) throw std::logic_error("ExpertRuntime: a CPU lane is attached already");
    lane_ = std::make_unique<LaneLink>(device_, arena, hidden, split, limit);
}

void ExpertRuntime::detach_lane(StreamHandle compute) {
    if (!lane_) return;
    lane_->close(compute);
    const LaneCounts counts = lane_->counts(compute);
    totals_.cpu_picks += counts.experts;
    totals_.cpu_steps += counts.steps;
    lane_.reset();
}

LaneLink& ExpertRuntime::attached() const {
    if (!lane_) throw std::logic_error("ExpertRuntime: no CPU lane is attached");
    return *lane_;
}

void ExpertRuntime::set_split(const SplitConfig& split, StreamHandle compute) {
    attached().set_split(split, compute);
}

void ExpertRuntime::decode_split(int layer, const std::int64_t* picks, int n, int rows, const void* x, void* weights,
                                 StreamHandle compute) {
    check_decode(layer, n, rows);
    if (rows < 1 || rows > cpu::kLaneRows || n % rows) {
        throw std::invalid_argument("ExpertRuntime: a split step has 1 to 8 rows of equally many picks, got " +
                                    std::to_string(n) + " picks of " + std::to_string(rows) + " rows");
    }
    LaneLink& lane = attached();
    const LaneStepJob job{layer, rows, n / rows, picks, weights, x};
    if (on_device()) {
        const int limit = config_.clock.max_admissions;
        lane.step(view(), job, limit, compute);
        if (limit > 0) launch_copy_admitted(view(), compute);
        return;
    }
    const int limit = lane.admission_limit(config_.clock.max_admissions);
    const ClockStep& step = host_step(layer, picks, n, rows, limit, compute);
    lane.step(step, cache_->scratch(), {&away(layer, 0), home(layer, 0), cache_->slot_bytes()}, job);
}

void ExpertRuntime::add_partial(int rows, void* out, bool half, StreamHandle compute) {
    if (rows < 0 || rows > cpu::kLaneRows) {
        throw std::invalid_argument("ExpertRuntime: a split step has 1 to 8 rows, not " + std::to_string(rows));
    }
    attached().add(rows, out, half, compute);
}

cpu::LaneVerdict ExpertRuntime::lane_verdict() const {
    return lane_ ? lane_->verdict() : cpu::LaneVerdict::kOk;
}

}  // namespace glm53
