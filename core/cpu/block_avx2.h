// Rotation, rounding and activation of one 128-channel block with AVX2, shared by the AVX2 and AVX-512 tables
// (internal).
#pragma once
#include "cpu/kernels.h"

namespace glm53::cpu {

// Kernels::quantise for one block: 128 values in natural order, its bias and its scale.
float quantise_block_avx2(const float* x, const uint16_t* suh, int16_t* values, int32_t* bias, float* scale);
// Kernels::rotate_out.
void rotate_out_avx2(float* y, float offset, const uint16_t* svh);
// Kernels::swiglu.
void swiglu_avx2(float* gate, const float* up, float limit);

}  // namespace glm53::cpu
