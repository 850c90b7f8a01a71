#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns inside its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <stdlib.h>

#include "cpu/tiles_avx512.h"
#include "tile_model.h"

namespace glm53 {
namespace {

// Eight tiles of 16 rows of 64 bytes, and the arithmetic of tdpbusd.
struct ModelTiles {
    static inline uint8_t tiles[8][16][64];
    static inline bool configured = false;

    static void configure() { configured = true; }
    static void release() { configured = false; }
    template <int T>
    static void zero() {
        if (!configured) abort();
        memset(tiles[T], 0, sizeof tiles[T]);
    }
    template <int T>
    static void load(const void* rows) {
        memcpy(tiles[T], rows, sizeof tiles[T]);
    }
    template <int T>
    static void store(void* rows) {
        memcpy(rows, tiles[T], sizeof tiles[T]);
    }
    template <int Sums, int A, int B>
    static void multiply() {
        for (int m = 0; m < 16; ++m) {
            for (int n = 0; n < 16; ++n) {
                uint32_t sum;
                memcpy(&sum, &tiles[Sums][m][4 * n], sizeof sum);
                for (int k = 0; k < 64; ++k) {
                    const int weight = static_cast<int8_t>(tiles[B][k / 4][4 * n + k % 4]);
                    sum += static_cast<uint32_t>(tiles[A][m][k] * weight);
                }
                memcpy(&tiles[Sums][m][4 * n], &sum, sizeof sum);
            }
        }
    }
};

template <int Bits>
void gemv(const cpu::Gemv* g) {
    cpu::tile_gemv<ModelTiles, Bits>(*g, cpu::kAvx512WordKernels.gemv[Bits - cpu::kMinBits]);
}

}  // namespace

namespace test {

const cpu::Kernels kModelTileKernels = {"model", 1, nullptr, {gemv<2>, gemv<3>, gemv<4>}, nullptr, nullptr};

bool model_tiles_released() {
    return !ModelTiles::configured;
}

int sign_on_tiles(const int16_t* values) {
    static cpu::TileScratch scratch;
    return cpu::set_activations(values, scratch);
}

}  // namespace test
}  // namespace glm53
