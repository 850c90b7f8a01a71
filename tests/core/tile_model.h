// The one-row products on a tile unit, run on a model of the unit (tile_model_avx512.cpp; needs what avx512w needs).
#pragma once
#include "cpu/kernels.h"

namespace glm53::test {

extern const cpu::Kernels kModelTileKernels;  // of one row, values in their natural order

// Whether the unit was left as it was found. A use that its instructions do not allow aborts.
bool model_tiles_released();
// How a block (128 values) is taken: whether it is negated, and whether it needs a third digit.
struct BlockDigits {
    bool negated, extra;
};
BlockDigits digits_on_tiles(const int16_t* values);

}  // namespace glm53::test
