#include "cuda/lane_step.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cuda/atomic>
#include <stdexcept>
#include <string>

#include "cpu/lane_block.h"
#include "cuda/expert_step.cuh"

namespace glm53 {
namespace {

using cpu::LaneSlot;
using cpu::LaneVerdict;

constexpr int kWarp = 32;
constexpr int kSplitThreads = 512;  // the policy's warp keeps the registers it has alone
constexpr int kAddThreads = 1024;
constexpr int kAddUnroll = 4;  // loads over PCIe in flight: 64 KB, a round trip for four rows of 4096
constexpr unsigned kPollNs = 200;

template <class Word>
using SystemWord = cuda::atomic_ref<Word, cuda::thread_scope_system>;

__device__ std::uint64_t nanoseconds() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// All threads but the first warp.
__device__ void write_rows(const LaneStepJob& job, int hidden, float* to) {
    const auto* x = static_cast<const uint2*>(job.x);
    auto* out = reinterpret_cast<float4*>(to);
    for (int i = static_cast<int>(threadIdx.x) - kWarp; i < job.rows * hidden / 4; i += kSplitThreads - kWarp) {
        const uint2 four = x[i];
        const float2 low = __half22float2(reinterpret_cast<const __half2&>(four.x));
        const float2 high = __half22float2(reinterpret_cast<const __half2&>(four.y));
        out[i] = make_float4(low.x, low.y, high.x, high.y);
    }
}

// One warp, behind a barrier after write_rows. The release at system scope covers what other threads wrote before that
// barrier.
__device__ void publish(const LaneStepView& v, const LaneStepJob& job, const ClockStep& step, const SplitStep& split,
                        std::uint32_t number) {
    const LaneSlot slot = cpu::lane_slot(v.block, v.hidden, number);
    auto* weights = static_cast<__half*>(job.weights);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int i = lane; i < job.rows * job.top_k; i += kWarp) {
        const int u = step.unique_of[i];
        const bool here = u >= 0 && split.on_cpu[u] != 0;
        slot.job->picks[i] = here ? step.expert[u] : cpu::kSkippedPick;
        slot.job->weights[i] = here ? __half2float(weights[i]) : 0.0f;
        if (here) weights[i] = __float2half_rn(0.0f);
    }
    if (lane == 0) {
        slot.job->layer = job.layer;
        slot.job->rows = job.rows;
        slot.job->top_k = job.top_k;
    }
    __syncwarp();
    if (lane == 0) {
        SystemWord<std::uint32_t>(slot.job->published).store(number, cuda::memory_order_release);
        v.state->published = number;
        v.state->cpu_experts += static_cast<std::uint64_t>(split.cpu);
        v.state->cpu_steps += 1;
    }
}

// The first warp decides while the others send the rows; then the first changes the tables while the second publishes.
__global__ void __launch_bounds__(kSplitThreads)
    split_kernel(ExpertStepView v, LaneStepView lane, LaneStepJob job, int max_admissions) {
    __shared__ ClockStep step;
    __shared__ ClockScratch clock;
    __shared__ SplitStep split;
    __shared__ SplitScratch scratch;
    const SplitConfig config = lane.state->split;
    const bool open = lane.state->verdict == static_cast<std::uint32_t>(LaneVerdict::kOk) && config.max_cpu > 0;
    const std::uint32_t number = lane.state->published + 1;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const WarpLanes lanes;
    if (warp == 0) {
        const int limit = open && config.max_admissions < max_admissions ? config.max_admissions : max_admissions;
        clock_step(clock_view(v.block, v.sizes), job.layer, job.picks, job.rows * job.top_k, job.rows, limit, step,
                   clock, lanes);
        if (open) {
            split_staged({v.away + job.layer * v.sizes.experts, v.layers[job.layer].home, v.slot_bytes}, step, clock,
                         lanes);
            split_step(config, step, clock, split, scratch, lanes);
        }
    } else if (open) {
        write_rows(job, lane.hidden, cpu::lane_slot(lane.block, lane.hidden, number).x);
    }
    __syncthreads();  // all have read the state
    const bool send = open && split.cpu > 0;
    if (warp == 0) apply_step(v, job.layer, step, lanes);
    if (warp == 1 && send) publish(lane, job, step, split, number);
    if (threadIdx.x == kWarp) lane.state->pending = send;
}

// Thread 0's wait; the verdict of `number`, kStalled when nobody gave one in time.
__device__ LaneVerdict await_done(const LaneStepView& v, const LaneSlot& slot, std::uint32_t number) {
    const std::uint64_t begin = nanoseconds();
    const SystemWord<std::uint64_t> done(slot.done->word);
    for (;;) {
        const LaneVerdict verdict = cpu::lane_verdict(done.load(cuda::memory_order_acquire), number);
        if (verdict != LaneVerdict::kPending) return verdict;
        if (nanoseconds() - begin > v.limit_ns) return LaneVerdict::kStalled;
        __nanosleep(kPollNs);
    }
}

__device__ void add_to(float* out, const float4& part) {
    auto* four = reinterpret_cast<float4*>(out);
    const float4 now = *four;
    *four = make_float4(now.x + part.x, now.y + part.y, now.z + part.z, now.w + part.w);
}
__device__ void add_to(__half* out, const float4& part) {
    auto* two = reinterpret_cast<__half2*>(out);
    const float2 low = __half22float2(two[0]), high = __half22float2(two[1]);
    two[0] = __floats2half2_rn(low.x + part.x, low.y + part.y);
    two[1] = __floats2half2_rn(high.x + part.z, high.y + part.w);
}

template <class Out>
__global__ void __launch_bounds__(kAddThreads) add_kernel(LaneStepView v, int rows, Out* out) {
    __shared__ LaneVerdict verdict;
    if (v.state->pending == 0) return;
    const std::uint32_t number = v.state->published;
    const LaneSlot slot = cpu::lane_slot(v.block, v.hidden, number);
    if (threadIdx.x == 0) {
        verdict = await_done(v, slot, number);
        if (verdict != LaneVerdict::kOk) {
            v.state->verdict = static_cast<std::uint32_t>(verdict);
            SystemWord<std::uint32_t>(*v.status).store(static_cast<std::uint32_t>(verdict), cuda::memory_order_release);
        }
    }
    __syncthreads();
    if (verdict != LaneVerdict::kOk) return;
    const auto* sum = reinterpret_cast<const float4*>(slot.result);
    const int all = rows * v.hidden / 4;
    for (int i = static_cast<int>(threadIdx.x); i < all; i += kAddThreads * kAddUnroll) {
        float4 part[kAddUnroll];
#pragma unroll
        for (int u = 0; u < kAddUnroll; ++u) {  // not a copy that an earlier job left in a cache
            if (i + u * kAddThreads < all) part[u] = __ldcv(sum + i + u * kAddThreads);
        }
#pragma unroll
        for (int u = 0; u < kAddUnroll; ++u) {
            if (i + u * kAddThreads < all) add_to(out + 4 * (i + u * kAddThreads), part[u]);
        }
    }
}

void check_rows(int rows) {
    if (rows < 0 || rows > cpu::kLaneRows) {
        throw std::invalid_argument("the CPU lane takes up to 8 rows, not " + std::to_string(rows));
    }
}

void check_aligned(const char* what, const void* address) {
    if (reinterpret_cast<std::uintptr_t>(address) % sizeof(float4)) {
        throw std::invalid_argument(std::string("the CPU lane needs ") + what + " at a multiple of 16 bytes");
    }
}

template <class Out>
void launch_add(const LaneStepView& lane, int rows, Out* out, StreamHandle stream) {
    check_rows(rows);
    check_aligned("its output", out);
    add_kernel<<<1, kAddThreads, 0, static_cast<cudaStream_t>(stream)>>>(lane, rows, out);
    check_launch("add_kernel");
}

}  // namespace

void launch_split_step(const ExpertStepView& view, const LaneStepView& lane, const LaneStepJob& job, int max_admissions,
                       StreamHandle stream) {
    check_rows(job.rows);
    if (job.top_k < 0 || job.top_k > cpu::kLanePicks || job.rows * job.top_k > cpu::kLanePicks) {
        throw std::invalid_argument("the CPU lane takes up to 64 picks, not " + std::to_string(job.rows) + " x " +
                                    std::to_string(job.top_k));
    }
    check_aligned("its rows", job.x);
    split_kernel<<<1, kSplitThreads, 0, static_cast<cudaStream_t>(stream)>>>(view, lane, job, max_admissions);
    check_launch("split_kernel");
}

void launch_lane_add(const LaneStepView& lane, int rows, float* out, StreamHandle stream) {
    launch_add(lane, rows, out, stream);
}

void launch_lane_add_half(const LaneStepView& lane, int rows, void* out, StreamHandle stream) {
    launch_add(lane, rows, static_cast<__half*>(out), stream);
}

}  // namespace glm53
