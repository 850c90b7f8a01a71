// AVX-512 kernels in 16-bit lanes (VBMI for the bit fields, VNNI for the dot products), for processors whose two vector
// ports count every operation alike and run a 32-bit multiplication as two: Intel's. quads_avx512.h has the layout.
// Eight tile rows (one block of activations) are summed in registers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns inside its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#include <string.h>

#include "cpu/block_avx2.h"
#include "cpu/by_rows.h"
#include "cpu/kernels.h"
#include "cpu/pass_avx512.h"
#include "cpu/quads_avx512.h"
#include "exl3/constants.h"

namespace glm53::cpu {
namespace {

template <int Bits>
struct Decoder {
    const Pairs<Bits> layout;
    __m512i pairs[Pairs<Bits>::kCount];

    void load(const uint8_t* tile) {
#pragma GCC unroll 4
        for (int p = 0; p < Pairs<Bits>::kCount; ++p) pairs[p] = layout.load(tile, p);
    }
    // The byte sums of a quad's states, one a word.
    template <int Quad>
    __m512i sums() const {
        const Products products = multiply_quad<Bits, Quad>(pairs[pair_of(Bits, Quad)]);
        const __m512i ones = _mm512_set1_epi8(1);
        return _mm512_add_epi16(_mm512_maddubs_epi16(products.low, ones), _mm512_maddubs_epi16(products.high, ones));
    }
};

inline __m512i broadcast4(const int16_t* x) {
    int64_t values;
    memcpy(&values, x, sizeof values);
    return _mm512_set1_epi64(values);
}

// Adds quads 2 U and 2 U + 1, which share their rows: columns 0-7 to a, columns 8-15 to b.
template <int Bits, int U, int Rows>
inline void add_quads(const Decoder<Bits>& decoder, const int16_t* x, ptrdiff_t x_stride, __m512i a[Rows],
                      __m512i b[Rows]) {
    const __m512i first = decoder.template sums<2 * U>();
    const __m512i second = decoder.template sums<2 * U + 1>();
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const __m512i values = broadcast4(x + r * x_stride + 4 * U);
        a[r] = _mm512_dpwssd_epi32(a[r], first, values);
        b[r] = _mm512_dpwssd_epi32(b[r], second, values);
    }
}

// Each column's two dwords (a: columns 0-7, b: 8-15), added.
inline __m512i fold(__m512i a, __m512i b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b));
}

// [0 = columns 0-7, 1 = 8-15][row]
template <int Rows>
using RowSums = __m512i[2][Rows];

template <int Bits, int Rows>
inline void run_pass(Decoder<Bits>& decoder, const Pass& pass, RowSums<Rows>& sums) {
    __m512i a[Rows];
    __m512i b[Rows];
    for (int r = 0; r < Rows; ++r) {
        a[r] = b[r] = _mm512_maskz_set1_epi32(0x5555, pass.bias[r * pass.bias_stride]);
    }
#pragma GCC unroll 1
    for (int i = 0; i < kBlockTiles; ++i) {
        prefetch_tile<Bits>(pass, i);
        decoder.load(pass.tile + i * pass.tile_stride);
        const int16_t* x = pass.x + i * exl3::kTileSide;
        add_quads<Bits, 0, Rows>(decoder, x, pass.x_stride, a, b);
        add_quads<Bits, 1, Rows>(decoder, x, pass.x_stride, a, b);
        add_quads<Bits, 2, Rows>(decoder, x, pass.x_stride, a, b);
        add_quads<Bits, 3, Rows>(decoder, x, pass.x_stride, a, b);
    }
    for (int r = 0; r < Rows; ++r) sums[0][r] = a[r], sums[1][r] = b[r];
}

template <int Bits, int Rows>
struct Kernel {
    using Sums = RowSums<Rows>;
    static void multiply(const Gemv& g) { walk<Bits, Rows, Kernel>(g); }
    Decoder<Bits> decoder;
    void run(const Pass& pass, Sums& sums) { run_pass<Bits, Rows>(decoder, pass, sums); }
    static __m512i total(const Sums& sums, int r) { return fold(sums[0][r], sums[1][r]); }
};

// Each 16 values in the order 0, 1, 8, 9, 2, 3, 10, 11, ...: four to a pair of quads.
float quantise(const float* x, const uint16_t* suh, Activations* out, int row, int block) {
    const ptrdiff_t index = row * (out->stride / kBlock) + block;
    int16_t* values = out->values + index * kBlock;
    const float offset = quantise_block_avx2(x, suh, values, out->bias + index, out->scale + index);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int i = 0; i < kBlock; i += exl3::kTileSide) {
        __m256i* tile = reinterpret_cast<__m256i*>(values + i);
        _mm256_storeu_si256(tile, _mm256_permutevar8x32_epi32(_mm256_loadu_si256(tile), order));
    }
    return offset;
}

}  // namespace

const Kernels kAvx512WordKernels = {
    "avx512w", 1, quantise, {gemv<Kernel, 2>, gemv<Kernel, 3>, gemv<Kernel, 4>}, rotate_out_avx2, swiglu_avx2};

}  // namespace glm53::cpu
