// AVX-512 kernels in 16-bit lanes (VBMI for the bit fields, VNNI for the dot products), for processors whose two vector
// ports count every operation alike and run a 32-bit multiplication as two: Intel's.
//
// A tile is eight "groups" of K dwords, 32 states each: group i holds column i (states 0-3, 8-11, 16-19, 24-27) and
// column i + 8 (the others). A vector holds one "quad" (four states in a row) of every group: quad q is
//   column i + 8 (q % 2), rows 2 (q / 2) + {0, 1, 8, 9}
// in 64-bit element i. Two dwords of the stream side by side hold every state that ends in them 16 bits or more from
// their start, and the bits of such a pair run on from the low end of the first dword to the high end of the second,
// as a rotation of the element does: one multishift takes a quad out of it, whatever its alignment.
// The 32-bit product of a state is made in halves. Eight tile rows (one block of activations) are summed in registers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns inside its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#include <string.h>

#include "cpu/block_avx2.h"
#include "cpu/kernels.h"
#include "cpu/pass_avx512.h"
#include "exl3/constants.h"

namespace glm53::cpu {
namespace {

constexpr int kQuads = 8;  // of a group

// The pair of dwords that quad q is taken from: dwords K i + pair - 1 and K i + pair of group i. The first whose end
// the quad does not pass.
constexpr int pair_of(int bits, int quad) {
    return (bits * (4 * quad + 4) + 31) / 32 - 1;
}
constexpr bool starts_inside(int bits) {
    for (int q = 0; q < kQuads; ++q) {
        if (32 * (pair_of(bits, q) - 1) > bits * (4 * q + 1) - 16) return false;
    }
    return true;
}
static_assert(starts_inside(2) && starts_inside(3) && starts_inside(4));

// For each byte of the quad's four states, where it begins in its 64-bit element: bit b of the stream (counted from the
// pair's first) is bit 31 - b of the element, modulo 64.
constexpr uint64_t quad_fields(int bits, int quad) {
    const int first = 32 * (pair_of(bits, quad) - 1);
    uint64_t fields = 0;
    for (int byte = 0; byte < 8; ++byte) {
        const int end = bits * (4 * quad + byte / 2 + 1) - first;
        const int begin = (32 - end + 8 * (byte % 2)) & 63;
        fields |= static_cast<uint64_t>(begin) << (8 * byte);
    }
    return fields;
}

// Where the dwords of a pair lie: 0-15 of the tile's first 64 bytes, 16-31 of its last 64. The dword before the first
// is the tile's last: the ring closes, and no load leaves the tile.
struct Order {
    alignas(64) int32_t dwords[16];
};
constexpr Order pair_order(int bits, int pair) {
    Order order{};
    for (int i = 0; i < 16; ++i) {
        const int dword = (bits * (i / 2) + pair - 1 + i % 2 + 8 * bits) % (8 * bits);
        order.dwords[i] = dword < 16 ? dword : dword - (8 * bits - 16) + 16;
    }
    return order;
}
template <int Bits>
struct PairOrders {
    static constexpr Order kOrders[4] = {pair_order(Bits, 0), pair_order(Bits, 1), pair_order(Bits, 2),
                                         pair_order(Bits, 3)};
};

template <int Bits>
struct Decoder {
    static constexpr int kPairs = pair_of(Bits, kQuads - 1) + 1;
    __m512i orders[kPairs];
    __m512i pairs[kPairs];

    Decoder() {
        for (int p = 0; p < kPairs; ++p) orders[p] = _mm512_load_si512(PairOrders<Bits>::kOrders[p].dwords);
    }
    void load(const uint8_t* tile) {
        const __m512i low = load64(tile);
        const __m512i high = load64(tile + 32 * Bits - 64);
#pragma GCC unroll 4
        for (int p = 0; p < kPairs; ++p) pairs[p] = _mm512_permutex2var_epi32(low, orders[p], high);
    }
    // The byte sums of a quad's states, one a word.
    template <int Quad>
    __m512i sums() const {
        const __m512i fields = _mm512_set1_epi64(static_cast<int64_t>(quad_fields(Bits, Quad)));
        const __m512i states = _mm512_multishift_epi64_epi8(fields, pairs[pair_of(Bits, Quad)]);
        const __m512i low_factor = _mm512_set1_epi16(static_cast<int16_t>(exl3::kMul1Multiplier & 0xffff));
        const __m512i high_factor = _mm512_set1_epi16(static_cast<int16_t>(exl3::kMul1Multiplier >> 16));
        const __m512i low = _mm512_mullo_epi16(states, low_factor);
        const __m512i high =
            _mm512_add_epi16(_mm512_mulhi_epu16(states, low_factor), _mm512_mullo_epi16(states, high_factor));
        const __m512i ones = _mm512_set1_epi8(1);
        return _mm512_add_epi16(_mm512_maddubs_epi16(low, ones), _mm512_maddubs_epi16(high, ones));
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
    Decoder<Bits> decoder;
    void run(const Pass& pass, Sums& sums) { run_pass<Bits, Rows>(decoder, pass, sums); }
    static __m512i total(const Sums& sums, int r) { return fold(sums[0][r], sums[1][r]); }
};

template <int Bits, int Rows>
void gemv_rows(const Gemv& g) {
    walk<Bits, Rows, Kernel<Bits, Rows>>(g);
}

template <int Bits>
void gemv(const Gemv* g) {
    using Rows = void (*)(const Gemv&);
    static constexpr Rows kByRows[kMaxRows] = {gemv_rows<Bits, 1>, gemv_rows<Bits, 2>, gemv_rows<Bits, 3>,
                                               gemv_rows<Bits, 4>, gemv_rows<Bits, 5>, gemv_rows<Bits, 6>,
                                               gemv_rows<Bits, 7>, gemv_rows<Bits, 8>};
    kByRows[g->rows - 1](*g);
}

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

const Kernels kAvx512WordKernels = {"avx512w", 1, quantise, {gemv<2>, gemv<3>, gemv<4>}, rotate_out_avx2, swiglu_avx2};

}  // namespace glm53::cpu
