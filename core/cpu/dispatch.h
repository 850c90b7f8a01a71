// Chooses the kernel table for this processor, or the one a caller names.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "cpu/kernels.h"

namespace glm53::cpu {

// Names of the tables this processor can run, best first; the last is "scalar". Which of "avx512", "avx512w" and "amx"
// comes first is measured at the first call (kernel_race.h) and stays so in this process.
std::vector<std::string> available_isas();

// "auto" (the first available), "amx", "avx512", "avx512w", "avx2" or "scalar". Throws std::invalid_argument for
// another name or for an instruction set that this processor lacks.
const Kernels& select_kernels(std::string_view isa);

}  // namespace glm53::cpu
