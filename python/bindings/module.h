// The pieces of the Python module: one bind_* function a file, all called from module.cpp.
#pragma once
#include <nanobind/nanobind.h>

namespace glm53::bindings {
void bind_build_info(nanobind::module_& m);
void bind_cpu(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_clock(nanobind::module_& m);
void bind_runtime(nanobind::module_& m);
void bind_lane(nanobind::module_& m);
}  // namespace glm53::bindings
