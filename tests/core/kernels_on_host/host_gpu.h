// A Device for kernels_on_host: says it is a GPU, keeps its memory in the host's, and queues copies with the kernels.
#pragma once
#include <memory>

#include "device/device.h"

namespace glm53::test {

std::shared_ptr<Device> make_host_gpu();

}  // namespace glm53::test
