// The CUDA kernels' logic without a GPU: the same cases as on one, with every block's threads in random order.
#include "kernels_on_host/host_gpu.h"
#include "queued_lane_cases.h"
#include "runtime_device_cases.h"
#include "runtime_lane_cases.h"

std::shared_ptr<glm53::Device> make_test_device() {
    return glm53::test::make_host_gpu();
}

int soak_steps() {
    return 300;
}
