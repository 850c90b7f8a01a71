// Which of two kernel tables this processor runs faster.
#pragma once
#include "cpu/kernels.h"

namespace glm53::cpu {

// Times one-row products of K = 3, the case that decoding waits for, on a piece that stays in the L2 cache: `second`
// where it gives the same bits in clearly less time, else `first`. So the choice changes nothing but speed. Costs: 1 to
// 2 ms on the calling thread, 60 KB.
const Kernels& faster_kernels(const Kernels& first, const Kernels& second);

}  // namespace glm53::cpu
