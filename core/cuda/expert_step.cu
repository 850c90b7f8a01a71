#include "cuda/expert_step.h"

#include "cuda/expert_step.cuh"

namespace glm53 {
namespace {

constexpr int kCopyBlocks = 16, kCopyThreads = 512, kCopyUnroll = 4;  // enough loads in flight for a full PCIe link

__global__ void __launch_bounds__(kDecideThreads)
    decide_kernel(ExpertStepView v, int layer, const std::int64_t* picks, int n, int rows, int max_admissions) {
    __shared__ ClockStep step;
    __shared__ ClockScratch scratch;
    const WarpLanes lanes;
    clock_step(clock_view(v.block, v.sizes), layer, picks, n, rows, max_admissions, step, scratch, lanes);
    apply_step(v, layer, step, lanes);
}

// Plain loads of mapped host memory or of a staging buffer: no cache holds stale bytes of homes, which never change,
// and a buffer is filled before the kernels that read it are launched.
__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const CopyList* list, std::uint64_t slot_bytes) {
    const int count = list->count;
    const std::uint64_t words = slot_bytes / sizeof(uint4);
    const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
    for (int c = 0; c < count; ++c) {
        const auto* from = reinterpret_cast<const uint4*>(list->from[c]);
        auto* to = reinterpret_cast<uint4*>(list->to[c]);
        for (std::uint64_t i = blockIdx.x * static_cast<std::uint64_t>(blockDim.x) + threadIdx.x; i < words;
             i += stride * kCopyUnroll) {
            uint4 held[kCopyUnroll];
#pragma unroll
            for (int u = 0; u < kCopyUnroll; ++u) {
                if (i + u * stride < words) held[u] = __ldcs(from + i + u * stride);
            }
#pragma unroll
            for (int u = 0; u < kCopyUnroll; ++u) {
                if (i + u * stride < words) to[i + u * stride] = held[u];
            }
        }
    }
}

__global__ void __launch_bounds__(kPromptThreads)
    prompt_kernel(ExpertStepView v, int layer, const std::int64_t* picks, int n, int rows, bool repoint) {
    __shared__ std::int32_t counts[kMaxExperts];
    __shared__ std::uint32_t distinct, missing;
    const int experts = v.sizes.experts;
    const ClockView state = clock_view(v.block, v.sizes);
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    if (threadIdx.x == 0) distinct = missing = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const std::int64_t e = picks[i];
        if (e >= 0 && e < experts) atomicAdd(&counts[e], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        const int slot = state.slot_of[layer * experts + e];
        if (counts[e]) {
            atomicAdd(&distinct, 1u);
            if (slot < 0) atomicAdd(&missing, 1u);
        }
        if (repoint) point(v, layer, e, slot >= 0 ? slot_address(v, slot) : away_address(v, layer, e));
    }
    if (threadIdx.x < 32) clock_note_rows(state, layer, counts, rows, WarpLanes{});
    __syncthreads();
    if (threadIdx.x == 0) {
        v.prompts->passes += 1;
        v.prompts->picks += static_cast<std::uint64_t>(n);
        v.prompts->distinct += distinct;
        v.prompts->missing += missing;
    }
}

__global__ void __launch_bounds__(kPromptThreads)
    write_tables_kernel(ExpertStepView v, int layer, const std::int64_t* image) {
    const int experts = v.sizes.experts;
    for (int i = threadIdx.x; i < (kExpertParts + 1) * experts; i += blockDim.x) {
        const std::int64_t address = __ldcv(reinterpret_cast<const long long*>(image) + i);
        if (i < kExpertParts * experts) {
            v.layers[layer].part[i / experts][i % experts] = address;
        } else {
            v.away[layer * experts + i % experts] = static_cast<std::uint64_t>(address);
        }
    }
}

}  // namespace

void launch_decode_step(const ExpertStepView& view, int layer, const std::int64_t* picks, int n, int rows,
                        int max_admissions, StreamHandle stream) {
    const auto on = static_cast<cudaStream_t>(stream);
    decide_kernel<<<1, kDecideThreads, 0, on>>>(view, layer, picks, n, rows, max_admissions);
    check_launch("decide_kernel");
    if (max_admissions > 0) launch_copy_admitted(view, stream);
}

void launch_copy_admitted(const ExpertStepView& view, StreamHandle stream) {
    copy_kernel<<<kCopyBlocks, kCopyThreads, 0, static_cast<cudaStream_t>(stream)>>>(view.copies, view.slot_bytes);
    check_launch("copy_kernel");
}

void launch_prompt_step(const ExpertStepView& view, int layer, const std::int64_t* picks, int n, int rows, bool point,
                        StreamHandle stream) {
    prompt_kernel<<<1, kPromptThreads, 0, static_cast<cudaStream_t>(stream)>>>(view, layer, picks, n, rows, point);
    check_launch("prompt_kernel");
}

void launch_write_tables(const ExpertStepView& view, int layer, const std::int64_t* image, StreamHandle stream) {
    write_tables_kernel<<<1, kPromptThreads, 0, static_cast<cudaStream_t>(stream)>>>(view, layer, image);
    check_launch("write_tables_kernel");
}

}  // namespace glm53
