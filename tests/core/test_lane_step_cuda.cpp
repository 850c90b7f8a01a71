// The CPU lane of an ExpertRuntime on a GPU: the cases of the host device, then what only a GPU can show: whole layers
// queued without a wait, captured graphs, and a long soak, all bit for bit. Run it on a new kind of GPU before fast
// mode is used there:
//   cmake --preset cuda -DGLM53_TESTS=ON && cmake --build --preset cuda && build/cuda/tests/core/test_lane_step_cuda
#include <cuda_runtime_api.h>

#include "queued_lane_cases.h"
#include "runtime_device_cases.h"
#include "runtime_lane_cases.h"

std::shared_ptr<glm53::Device> make_test_device() {
    return glm53::make_cuda_device(0);
}

int soak_steps() {
    return 10'000;
}

namespace {

void check(cudaError_t status) {
    CAPTURE(cudaGetErrorString(status));
    REQUIRE(status == cudaSuccess);
}

struct Stream {
    cudaStream_t handle = nullptr;
    Stream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
    ~Stream() { cudaStreamDestroy(handle); }
};

}  // namespace

TEST_CASE("launches captured once go on with the lane's numbers; two graphs take turns") {
    World w;
    const auto lane = w.lane();
    w.attach();
    const Stream stream;
    constexpr int kGraphs = 2;
    cudaGraphExec_t graphs[kGraphs];
    for (int g = 0; g < kGraphs; ++g) {
        const StepData shape = w.next(g, 1 + 3 * g);
        cudaGraph_t graph;
        check(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal));
        w.queue_split(shape, stream.handle);
        w.runtime->add_partial(shape.rows, w.out.at(), false, stream.handle);
        check(cudaStreamEndCapture(stream.handle, &graph));
        check(cudaGraphInstantiate(&graphs[g], graph, 0));
        check(cudaGraphDestroy(graph));
    }
    int different = 0, diverted = 0;
    for (int i = 0; i < 400; ++i) {
        const int g = i % 3 ? 0 : 1;
        StepData step = w.next(g, 1 + 3 * g);
        const StepData before = step;
        const std::vector<float> base = random_rows(w, step.rows);
        w.put(step);
        w.out.put(base);
        check(cudaGraphLaunch(graphs[g], stream.handle));
        check(cudaStreamSynchronize(stream.handle));
        w.get(step);
        diverted += zeros(step) > 0;
        different += w.out.get(base.size()) != plus(base, diverted_sum(w, before, step));
    }
    for (const cudaGraphExec_t graph : graphs) check(cudaGraphExecDestroy(graph));
    CHECK(different == 0);
    CHECK(diverted > 100);
    CHECK(lane->stats().jobs == static_cast<std::uint64_t>(diverted));
}
