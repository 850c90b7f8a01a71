#include "cuda/lane_step.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cuda/atomic>
#include <stdexcept>
#include <string>

namespace glm53 {
namespace {

using cpu::LaneSlot;
using cpu::LaneVerdict;

constexpr int kLaneThreads = 1024;
constexpr unsigned kPollNs = 200;

template <class Word>
using SystemWord = cuda::atomic_ref<Word, cuda::thread_scope_system>;

__device__ std::uint64_t nanoseconds() {
    std::uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__global__ void __launch_bounds__(kLaneThreads) publish_kernel(LaneStepView v, LaneStepJob job) {
    const int picks = job.rows * job.top_k, lane = static_cast<int>(threadIdx.x);
    const bool mine = lane < picks && job.on_cpu[lane] != 0;
    const bool send = __syncthreads_or(mine) && v.state->verdict == static_cast<std::uint32_t>(LaneVerdict::kOk);
    const std::uint32_t number = v.state->published + 1;
    __syncthreads();  // all have read the state
    if (send) {
        const LaneSlot slot = cpu::lane_slot(v.block, v.hidden, number);
        if (lane < picks) {
            slot.job->picks[lane] = mine ? static_cast<std::int32_t>(job.picks[lane]) : -1;
            slot.job->weights[lane] = __half2float(static_cast<const __half*>(job.weights)[lane]);
        }
        const auto* x = static_cast<const __half2*>(job.x);
        auto* to = reinterpret_cast<float2*>(slot.x);
        for (int i = lane; i < job.rows * v.hidden / 2; i += kLaneThreads) to[i] = __half22float2(x[i]);
        if (lane == 0) {
            slot.job->layer = job.layer;
            slot.job->rows = job.rows;
            slot.job->top_k = job.top_k;
        }
        __threadfence_system();
        __syncthreads();  // every write above precedes the flag
        if (lane == 0) {
            SystemWord<std::uint32_t>(slot.job->published).store(number, cuda::memory_order_release);
            v.state->published = number;
        }
    }
    if (send && mine) job.picks[lane] = job.diverted;
    if (lane == 0) v.state->pending = send ? number : 0;
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

__device__ void add_to(float& out, float value) {
    out += value;
}
__device__ void add_to(__half& out, float value) {
    out = __float2half_rn(__half2float(out) + value);
}

template <class Out>
__global__ void __launch_bounds__(kLaneThreads) add_kernel(LaneStepView v, int rows, Out* out) {
    __shared__ LaneVerdict verdict;
    const std::uint32_t number = v.state->pending;
    if (number == 0) return;
    const LaneSlot slot = cpu::lane_slot(v.block, v.hidden, number);
    if (threadIdx.x == 0) {
        verdict = await_done(v, slot, number);
        if (verdict != LaneVerdict::kOk) {
            v.state->verdict = static_cast<std::uint32_t>(verdict);
            SystemWord<std::uint32_t>(*v.status).store(static_cast<std::uint32_t>(verdict), cuda::memory_order_release);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) v.state->pending = 0;
    if (verdict != LaneVerdict::kOk) return;
    const auto* sum = reinterpret_cast<const float4*>(slot.result);
    for (int i = static_cast<int>(threadIdx.x); i < rows * v.hidden / 4; i += kLaneThreads) {
        const float4 part = __ldcv(sum + i);  // not a copy that an earlier job left in a cache
        add_to(out[4 * i], part.x);
        add_to(out[4 * i + 1], part.y);
        add_to(out[4 * i + 2], part.z);
        add_to(out[4 * i + 3], part.w);
    }
}

void check_launch(const char* kernel) {
    const cudaError_t status = cudaGetLastError();
    if (status == cudaSuccess) return;
    throw DeviceFailure(std::string(kernel) + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) +
                        "); this build may lack code for this GPU's architecture");
}

void check_rows(int rows) {
    if (rows < 0 || rows > cpu::kLaneRows) {
        throw std::invalid_argument("the CPU lane takes up to 8 rows, not " + std::to_string(rows));
    }
}

}  // namespace

void launch_lane_publish(const LaneStepView& view, const LaneStepJob& job, StreamHandle stream) {
    check_rows(job.rows);
    if (job.top_k < 0 || job.top_k > cpu::kLanePicks || job.rows * job.top_k > cpu::kLanePicks) {
        throw std::invalid_argument("the CPU lane takes up to 64 picks, not " + std::to_string(job.rows) + " x " +
                                    std::to_string(job.top_k));
    }
    publish_kernel<<<1, kLaneThreads, 0, static_cast<cudaStream_t>(stream)>>>(view, job);
    check_launch("publish_kernel");
}

void launch_lane_add(const LaneStepView& view, int rows, float* out, StreamHandle stream) {
    check_rows(rows);
    add_kernel<<<1, kLaneThreads, 0, static_cast<cudaStream_t>(stream)>>>(view, rows, out);
    check_launch("add_kernel");
}

void launch_lane_add_half(const LaneStepView& view, int rows, void* out, StreamHandle stream) {
    check_rows(rows);
    add_kernel<<<1, kLaneThreads, 0, static_cast<cudaStream_t>(stream)>>>(view, rows, static_cast<__half*>(out));
    check_launch("add_kernel");
}

}  // namespace glm53
