// What the kernels of a decode step share, with and without the CPU lane: where experts are, and how a decided step
// changes the address tables. For .cu files.
#pragma once
#include <cuda_runtime.h>

#include <string>

#include "cache/clock.h"
#include "cuda/expert_step.h"

namespace glm53 {

__device__ inline std::uint64_t slot_address(const ExpertStepView& v, int slot) {
    return v.segments[slot / v.segment_slots] + static_cast<std::uint64_t>(slot % v.segment_slots) * v.slot_bytes;
}

__device__ inline std::uint64_t away_address(const ExpertStepView& v, int layer, int expert) {
    return v.away[layer * v.sizes.experts + expert];
}

__device__ inline void point(const ExpertStepView& v, int layer, int expert, std::uint64_t base) {
    const LayerTables& tables = v.layers[layer];
    for (int p = 0; p < kExpertParts; ++p) {
        tables.part[p][expert] = static_cast<std::int64_t>(base + v.part_offset[p]);
    }
}

// One warp: repoints the tables of what `step` touched and lists the copies of what it admitted.
__device__ inline void apply_step(const ExpertStepView& v, int layer, const ClockStep& step, const WarpLanes& lanes) {
    for (int u = lanes.lane(); u < step.unique; u += lanes.width()) {
        if (step.evicted[u] >= 0) {
            const int owner = step.evicted[u] / v.sizes.experts, expert = step.evicted[u] % v.sizes.experts;
            point(v, owner, expert, away_address(v, owner, expert));
        }
    }
    lanes.sync();
    for (int u = lanes.lane(); u < step.unique; u += lanes.width()) {
        const int expert = step.expert[u];
        point(v, layer, expert, step.slot[u] >= 0 ? slot_address(v, step.slot[u]) : away_address(v, layer, expert));
    }
    if (lanes.lane() == 0) {
        int count = 0;
        for (int u = 0; u < step.unique; ++u) {
            if (step.kind[u] != PickKind::Admitted) continue;
            v.copies->from[count] = away_address(v, layer, step.expert[u]);
            v.copies->to[count] = slot_address(v, step.slot[u]);
            ++count;
        }
        v.copies->count = count;
    }
}

inline void check_launch(const char* kernel) {
    const cudaError_t status = cudaGetLastError();
    if (status == cudaSuccess) return;
    throw DeviceFailure(std::string(kernel) + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) +
                        "); this build may lack code for this GPU's architecture");
}

}  // namespace glm53
