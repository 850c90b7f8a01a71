// The Python module glm53._core: validates and forwards, nothing else.
#include "module.h"

namespace nb = nanobind;

namespace glm53::bindings {

void bind_build_info(nb::module_& m) {
    m.attr("__version__") = GLM53_VERSION;
    m.def(
        "cuda_built",
        [] {
#ifdef GLM53_HAVE_CUDA
            return true;
#else
            return false;
#endif
        },
        "Whether this build contains the CUDA objects (it imports on machines without a GPU either way).");
    m.attr("cuda_architectures") = GLM53_CUDA_ARCHITECTURES;  // as CMake names them, e.g. "86-real 90"; "" without CUDA
}

}  // namespace glm53::bindings

NB_MODULE(_core, m) {
    m.doc() = "Native core of glm53";
    glm53::bindings::bind_build_info(m);
    glm53::bindings::bind_cpu(m);
    glm53::bindings::bind_memory(m);  // before whoever takes a Device
    glm53::bindings::bind_clock(m);
    glm53::bindings::bind_lane(m);  // after ExpertTable and HostArena
    glm53::bindings::bind_runtime(m);
}
