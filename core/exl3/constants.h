// Numbers of the EXL3 format. Constants only: the instruction-set files include this with their own compiler flags.
#pragma once
#include <stdint.h>

namespace glm53::exl3 {

constexpr int kTileSide = 16;
constexpr int kTileWeights = 256;
constexpr float kHadamardScale = 0.08838834764831845f;  // 1 / sqrt(128)

constexpr uint32_t kMul1Multiplier = 0x83DCD12Du;
constexpr float kMul1Step = 0.00676727294921875f;  // fp16 0x1eee: weight per unit of the state's byte sum
constexpr int kMul1Centre = 510;                   // byte sum that stands for (nearly) zero
// Mean over all states of (fp16 codebook value) - (byte sum - kMul1Centre) * kMul1Step: what the affine form misses.
constexpr float kMul1Offset = -0.0018124f;

}  // namespace glm53::exl3
