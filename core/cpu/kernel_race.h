// Which of several kernel tables this processor runs fastest.
#pragma once
#include <span>

#include "cpu/kernels.h"

namespace glm53::cpu {

// Times one-row products of K = 3, the case that decoding waits for, on a piece that stays in the L2 cache: the first
// of `tables`, or one behind it that gives the same bits in clearly less time. So the choice changes nothing but speed.
// Each runs by itself for a while, for a processor lowers its clock for wide vectors and more so for its tile unit.
// Costs: 5 ms a table on the calling thread, 60 KB. `tables` is not empty.
const Kernels& fastest_kernels(std::span<const Kernels* const> tables);

}  // namespace glm53::cpu
