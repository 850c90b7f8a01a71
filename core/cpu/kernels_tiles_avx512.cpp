// AVX-512 kernels that leave the dot products of one-row calls to AMX (tiles_avx512.h); more rows run in 16-bit lanes.
// The instructions are written out: g++ 12's intrinsics do not tell the compiler which memory they read.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns inside its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#include "cpu/block_avx2.h"
#include "cpu/kernels.h"
#include "cpu/tiles_avx512.h"

namespace glm53::cpu {
namespace {

struct Amx {
    static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
    static void release() { asm volatile("tilerelease" ::: "memory"); }
    template <int T>
    static void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(T));
    }
    template <int T>
    static void load(const void* rows) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(ptrdiff_t{64}), "i"(T) : "memory");
    }
    template <int T>
    static void store(void* rows) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(ptrdiff_t{64}), "i"(T) : "memory");
    }
    // C += A (signed bytes) times B (unsigned bytes).
    template <int C, int A, int B>
    static void multiply() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};

template <int Bits>
void gemv(const Gemv* g) {
    if (g->rows == 1) {
        tile_gemv<Amx, Bits>(*g);
    } else {
        kAvx512WordKernels.gemv[Bits - kMinBits](g);
    }
}

float quantise(const float* x, const uint16_t* suh, Activations* out, int row, int block) {
    if (!out->one_row) return kAvx512WordKernels.quantise(x, suh, out, row, block);
    return quantise_block_avx2(x, suh, out->values + block * kBlock, out->bias + block, out->scale + block);
}

}  // namespace

const Kernels kAmxKernels = {"amx", 1, quantise, {gemv<2>, gemv<3>, gemv<4>}, rotate_out_avx2, swiglu_avx2};

}  // namespace glm53::cpu
