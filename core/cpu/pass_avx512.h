// The walk of a product over tile columns and blocks that the AVX-512 tables share (internal). Only files that are
// compiled with the AVX-512 flags include it, and all of it has internal linkage.
#pragma once
#include <immintrin.h>

#include "cpu/kernels.h"
#include "exl3/constants.h"

namespace glm53::cpu {
namespace {

constexpr int kPrefetchTiles = 12;  // along n, for each of the eight streams of a pass

inline __m512i load64(const uint8_t* p) {
    return _mm512_loadu_si512(p);
}

// One tile column over one block of k.
struct Pass {
    const uint8_t* tile;
    const uint8_t* prefetch;  // what a later pass reads; may lie outside the tensor, which a prefetch forgives
    ptrdiff_t tile_stride;    // bytes to the tile below
    const int16_t* x;
    ptrdiff_t x_stride;
    const int32_t* bias;
    ptrdiff_t bias_stride;
};

template <int Bits>
inline void prefetch_tile(const Pass& pass, int i) {
    const char* p = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(pass.prefetch) +
                                                  static_cast<uintptr_t>(i * pass.tile_stride));
    _mm_prefetch(p, _MM_HINT_T0);
    if constexpr (Bits > 2) _mm_prefetch(p + 64, _MM_HINT_T0);
}

// y (16 columns) += scale * totals
inline void add_totals(__m512i totals, float scale, float* y) {
    _mm512_storeu_ps(y, _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals), _mm512_set1_ps(scale), _mm512_loadu_ps(y)));
}

// For every tile column of every block: kernel.run(pass, sums), then Kernel::total(sums, row), a row's 16 integer sums.
template <int Bits, int Rows, class Kernel>
inline void walk(const Gemv& g) {
    Kernel kernel;
    constexpr int kTileBytes = 32 * Bits;
    const ptrdiff_t row_bytes = static_cast<ptrdiff_t>(g.n_tiles) * kTileBytes;
    const ptrdiff_t blocks = g.x.stride / kBlock;
    const int width = g.n_end - g.n_begin;
    const int ahead = kPrefetchTiles < width ? kPrefetchTiles : width;
    for (int block = g.block_begin; block < g.block_end; ++block) {
        const int k = block * kBlockTiles;
        const uint8_t* row = g.trellis + k * row_bytes;
        const uintptr_t below = reinterpret_cast<uintptr_t>(row) + static_cast<uintptr_t>(kBlockTiles * row_bytes);
        for (int n = g.n_begin; n < g.n_end; ++n) {
            const uint8_t* tile = row + static_cast<ptrdiff_t>(n) * kTileBytes;
            const int next = n + ahead < g.n_end ? n + ahead : n + ahead - width;
            const uintptr_t prefetch =
                (next > n ? reinterpret_cast<uintptr_t>(row) : below) + static_cast<uintptr_t>(next) * kTileBytes;
            const Pass pass{tile,       reinterpret_cast<const uint8_t*>(prefetch),
                            row_bytes,  g.x.values + k * exl3::kTileSide,
                            g.x.stride, g.x.bias + block,
                            blocks};
            typename Kernel::Sums sums;
            kernel.run(pass, sums);
            for (int r = 0; r < Rows; ++r) {
                add_totals(Kernel::total(sums, r), g.x.scale[r * blocks + block],
                           g.y + r * g.y_stride + n * exl3::kTileSide);
            }
        }
    }
}

}  // namespace
}  // namespace glm53::cpu
