// The one-row products on a tile unit, run on a model of the unit (tile_model_avx512.cpp; needs what avx512w needs).
#pragma once
#include "cpu/kernels.h"

namespace glm53::test {

extern const cpu::Kernels kModelTileKernels;

// Whether the unit was left as it was found.
bool model_tiles_released();
// How a block (128 values) is taken: 1 as it is, -1 negated, 0 not at all.
int sign_on_tiles(const int16_t* values);

}  // namespace glm53::test
