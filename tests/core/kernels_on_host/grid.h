// CUDA kernels on the host, for tests of their logic where there is no GPU: the .cu files, translated by
// translate.cmake, are compiled as C++ with this header in front.
//
// A launch is queued on one thread, in order, whatever its stream: a GPU that never overlaps anything. A block's
// threads are fibers of that thread, resumed warp by warp and lane by lane in random order, each until its next
// barrier; a missing barrier shows as a wrong result in some order, a diverged one as an abort. Blocks run one after
// the other, so that __shared__ can be static. Not shown: memory order (every fiber sees every write at once), races
// between blocks, anything that takes time.
#pragma once
#include <cstdint>
#include <ctime>
#include <functional>

#define __host__
#define __device__
#define __global__ static
#define __shared__ static
#define __launch_bounds__(threads)

struct Dim3 {
    unsigned x = 0, y = 0, z = 0;
};
extern Dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the fiber that runs

namespace glm53::test {

// Returns at once; the queue runs the kernel for every thread of every block.
void launch(unsigned blocks, unsigned threads, std::function<void()> kernel);
// Anything else in the order of the queue.
void enqueue(std::function<void()> work);
void synchronize();  // until the queue is empty

void meet_block();
void meet_warp();
unsigned warp_min(unsigned value);
std::uint64_t nanoseconds();
void give_way();  // to the threads that a kernel polls for

}  // namespace glm53::test

inline void __syncthreads() {
    glm53::test::meet_block();
}
inline void __syncwarp() {
    glm53::test::meet_warp();
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    return glm53::test::warp_min(value);
}
inline void __nanosleep(unsigned) {
    glm53::test::give_way();
}
template <class T>
T __ldcs(const T* at) {
    return *at;
}
template <class T>
T __ldcv(const T* at) {
    return *at;
}
template <class T>
T atomicAdd(T* at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
}

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
