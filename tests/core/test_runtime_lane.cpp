// The CPU lane of an ExpertRuntime on the host device.
#include "runtime_device_cases.h"
#include "runtime_lane_cases.h"

std::shared_ptr<glm53::Device> make_test_device() {
    return glm53::make_host_device();
}

int soak_steps() {
    return 2000;
}
