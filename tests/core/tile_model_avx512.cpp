// A tile unit in plain C++, and the one-row products on it. Apart from test_tiles.cpp, for only this file may be built
// with the AVX-512 flags.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns inside its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <stdlib.h>
#include <string.h>

#include "cpu/tiles_avx512.h"
#include "tile_model.h"

namespace glm53 {
namespace {

// Eight tiles of the shapes they were given, and the arithmetic of tdpbsud; aborts where the instructions would fault.
struct ModelTiles {
    static inline uint8_t tiles[8][16][64];
    static inline cpu::TileConfig config;
    static inline bool configured = false;

    static void expect(bool good) {
        if (!good) abort();
    }
    static void configure(const cpu::TileConfig& wanted) {
        config = wanted;
        expect(config.palette == 1 && config.start_row == 0);
        for (int t = 0; t < 16; ++t) {
            expect(config.rows[t] <= (t < 8 ? 16 : 0) && config.row_bytes[t] <= (t < 8 ? 64 : 0));
        }
        memset(tiles, 0, sizeof tiles);
        configured = true;
    }
    static void release() { configured = false; }
    template <int T>
    static void zero() {
        expect(configured && config.rows[T] > 0);
        memset(tiles[T], 0, sizeof tiles[T]);
    }
    template <int T>
    static void load(const void* rows) {
        zero<T>();
        for (int r = 0; r < config.rows[T]; ++r) {
            memcpy(tiles[T][r], static_cast<const uint8_t*>(rows) + 64 * r, config.row_bytes[T]);
        }
    }
    template <int T>
    static void store(void* rows) {
        expect(configured && config.rows[T] > 0);
        for (int r = 0; r < config.rows[T]; ++r) {
            memcpy(static_cast<uint8_t*>(rows) + 64 * r, tiles[T][r], config.row_bytes[T]);
        }
    }
    template <int C, int A, int B>
    static void multiply() {
        static_assert(C != A && C != B && A != B);
        expect(configured && config.rows[C] == config.rows[A] && config.row_bytes[C] == config.row_bytes[B] &&
               config.row_bytes[A] == 4 * config.rows[B]);
        for (int m = 0; m < config.rows[C]; ++m) {
            for (int n = 0; n < config.row_bytes[C] / 4; ++n) {
                uint32_t sum;
                memcpy(&sum, &tiles[C][m][4 * n], sizeof sum);
                for (int k = 0; k < config.row_bytes[A]; ++k) {
                    const int activation = static_cast<int8_t>(tiles[A][m][k]);
                    sum += static_cast<uint32_t>(activation * tiles[B][k / 4][4 * n + k % 4]);
                }
                memcpy(&tiles[C][m][4 * n], &sum, sizeof sum);
            }
        }
    }
};

template <int Bits>
void gemv(const cpu::Gemv* g) {
    cpu::tile_gemv<ModelTiles, Bits>(*g);
}

}  // namespace

namespace test {

const cpu::Kernels kModelTileKernels = {"model", 1, nullptr, {gemv<2>, gemv<3>, gemv<4>}, nullptr, nullptr};

bool model_tiles_released() {
    return !ModelTiles::configured;
}

BlockDigits digits_on_tiles(const int16_t* values) {
    static cpu::TileScratch scratch;
    cpu::set_block(values, 0, 1.0f, scratch.blocks[0]);
    return {scratch.blocks[0].scale < 0, scratch.blocks[0].extra};
}

}  // namespace test
}  // namespace glm53
