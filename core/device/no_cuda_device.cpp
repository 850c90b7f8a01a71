// make_cuda_device of a build without CUDA; core/cuda/cuda_device.cpp has the real one.
#ifndef GLM53_HAVE_CUDA
#include "device/device.h"

namespace glm53 {

std::shared_ptr<Device> make_cuda_device(int index) {
    throw DeviceFailure("CUDA device " + std::to_string(index) +
                        ": this build of glm53 has no CUDA objects; install the CUDA wheel, or build from source where "
                        "nvcc is on PATH");
}

}  // namespace glm53
#endif
