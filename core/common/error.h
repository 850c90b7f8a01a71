// Errors of the core: exceptions that carry the values, so that the message alone says what happened.
#pragma once
#include <stdexcept>
#include <string>

namespace glm53 {

// The device refused (CUDA name, text and the call are in the message); Python sees glm53._core.DeviceFailure.
struct DeviceFailure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace glm53
