// CPU build: the device's kernels do not exist; no CUDA device can be made either, so nothing calls these.
#ifndef GLM53_HAVE_CUDA
#include "cuda/expert_step.h"
#include "cuda/lane_step.h"

namespace glm53 {

void launch_decode_step(const ExpertStepView&, int, const std::int64_t*, int, int, int, StreamHandle) {
    throw DeviceFailure("this build has no CUDA kernels");
}

void launch_prompt_step(const ExpertStepView&, int, const std::int64_t*, int, int, bool, StreamHandle) {
    throw DeviceFailure("this build has no CUDA kernels");
}

void launch_write_tables(const ExpertStepView&, int, const std::int64_t*, StreamHandle) {
    throw DeviceFailure("this build has no CUDA kernels");
}

void launch_copy_admitted(const ExpertStepView&, StreamHandle) {
    throw DeviceFailure("this build has no CUDA kernels");
}

void launch_split_step(const ExpertStepView&, const LaneStepView&, const LaneStepJob&, int, StreamHandle) {
    throw DeviceFailure("this build has no CUDA kernels");
}

void launch_lane_add(const LaneStepView&, int, float*, StreamHandle) {
    throw DeviceFailure("this build has no CUDA kernels");
}

void launch_lane_add_half(const LaneStepView&, int, void*, StreamHandle) {
    throw DeviceFailure("this build has no CUDA kernels");
}

}  // namespace glm53
#endif
