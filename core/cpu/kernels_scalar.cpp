// The scalar kernels: the oracle of the vector ones, and what runs on a processor that has none of their sets.
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/half.h"
#include "cpu/kernels.h"
#include "exl3/format.h"

namespace glm53::cpu {
namespace {

// Sylvester order, not scaled.
void hadamard(float* v) {
    for (int width = 1; width < kBlock; width *= 2) {
        for (int i = 0; i < kBlock; ++i) {
            if (i & width) continue;
            const float a = v[i];
            const float b = v[i + width];
            v[i] = a + b;
            v[i + width] = a - b;
        }
    }
}

float quantise(const float* x, const uint16_t* suh, Activations* out, int row, int block) {
    float v[kBlock];
    for (int i = 0; i < kBlock; ++i) v[i] = x[i] * half_to_float(suh[i]);
    hadamard(v);
    float largest = 0.0f;
    float sum = 0.0f;
    for (const float value : v) {
        largest = std::max(largest, std::fabs(value));
        sum += value;
    }
    const bool finite = std::isfinite(sum) && std::isfinite(largest);
    const float step = finite && largest > 0.0f ? largest / 32767.0f : 1.0f;
    const float inverse = 1.0f / step;
    const ptrdiff_t index = row * (out->stride / kBlock) + block;
    int32_t total = 0;
    for (int i = 0; i < kBlock; ++i) {
        const float rounded = finite ? std::nearbyint(v[i] * inverse) : 0.0f;
        const int16_t value = static_cast<int16_t>(std::clamp(rounded, -32767.0f, 32767.0f));
        out->values[index * kBlock + i] = value;
        total += value;
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    out->bias[index] = -exl3::kMul1Centre * total;
    out->scale[index] = (finite ? step : nan) * exl3::kMul1Step * exl3::kHadamardScale;
    return exl3::kMul1Offset * exl3::kHadamardScale * sum;
}

// One tile column over one block of k: the byte sums of eight tiles times the activations, in int32 that may wrap on
// the way (the bias brings the total back into range).
void block_sums(const Gemv& g, exl3::Rate rate, int n, int block, uint32_t sums[kMaxRows][exl3::kTileSide]) {
    for (int r = 0; r < g.rows; ++r) {
        const int32_t bias = g.x.bias[r * (g.x.stride / kBlock) + block];
        std::fill_n(sums[r], exl3::kTileSide, static_cast<uint32_t>(bias));
    }
    uint16_t states[exl3::kTileWeights];
    for (int k = block * kBlockTiles; k < (block + 1) * kBlockTiles; ++k) {
        const ptrdiff_t tile = static_cast<ptrdiff_t>(k) * g.n_tiles + n;
        exl3::decode_tile(g.trellis + tile * rate.tile_bytes(), rate, states);
        for (int t = 0; t < exl3::kTileWeights; ++t) {
            const int32_t weight = exl3::mul1_byte_sum(states[t]);
            for (int r = 0; r < g.rows; ++r) {
                const int32_t x = g.x.values[r * g.x.stride + k * exl3::kTileSide + exl3::row_of(t)];
                sums[r][exl3::column_of(t)] += static_cast<uint32_t>(weight * x);
            }
        }
    }
}

template <int Bits>
void gemv(const Gemv* args) {
    const Gemv& g = *args;
    const exl3::Rate rate = exl3::Rate::from_words(16 * Bits);
    uint32_t sums[kMaxRows][exl3::kTileSide];
    for (int block = g.block_begin; block < g.block_end; ++block) {
        for (int n = g.n_begin; n < g.n_end; ++n) {
            block_sums(g, rate, n, block, sums);
            for (int r = 0; r < g.rows; ++r) {
                const float scale = g.x.scale[r * (g.x.stride / kBlock) + block];
                float* y = g.y + r * g.y_stride + n * exl3::kTileSide;
                for (int c = 0; c < exl3::kTileSide; ++c) {
                    y[c] = std::fma(static_cast<float>(static_cast<int32_t>(sums[r][c])), scale, y[c]);
                }
            }
        }
    }
}

void rotate_out(float* y, float offset, const uint16_t* svh) {
    for (int i = 0; i < kBlock; ++i) y[i] += offset;
    hadamard(y);
    for (int i = 0; i < kBlock; ++i) y[i] *= exl3::kHadamardScale * half_to_float(svh[i]);
}

void swiglu(float* gate, const float* up, float limit) {
    for (int i = 0; i < kBlock; ++i) {
        float g = gate[i] / (1.0f + std::exp(-gate[i]));
        float u = up[i];
        if (limit > 0.0f) {
            g = g > limit ? limit : g;
            u = u > limit ? limit : u < -limit ? -limit : u;
        }
        gate[i] = g * u;
    }
}

}  // namespace

const Kernels kScalarKernels = {"scalar", 1, quantise, {gemv<2>, gemv<3>, gemv<4>}, rotate_out, swiglu};

}  // namespace glm53::cpu
