// AVX-512 kernels (VBMI for the byte permutations, VNNI for the byte sums and the dot products). A tile is 32 "lanes"
// of eight ring positions, one dword each in two vectors: lane L holds
//   positions 0-3: column L / 4,     rows 2 (L % 4) + {0, 1, 8, 9}
//   positions 4-7: column L / 4 + 8, the same rows
// Lane L spans K bytes of the stream and needs the two before them: one or two 32-bit windows, from which its eight
// states are shifted out. Eight tile rows (one block of activations) are summed in registers per pass.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns inside its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#include <string.h>

#include "cpu/block_avx2.h"
#include "cpu/by_rows.h"
#include "cpu/kernels.h"
#include "cpu/pass_avx512.h"
#include "exl3/constants.h"

namespace glm53::cpu {
namespace {

// Byte order that makes a window per lane: byte k of lane l is the stream byte first + K l - k, counted from the start
// of a 64-byte load; a negative one lies in the word that stands in for the word before the load (at byte `before`).
// The stream runs through each little-endian dword from its top byte down.
struct Order {
    alignas(64) uint8_t bytes[64];
};
constexpr Order window_order(int bits, int first, int before) {
    Order order{};
    for (int i = 0; i < 64; ++i) {
        int byte = first + bits * (i / 4) - i % 4;
        if (byte < 0) byte += before + 4;
        order.bytes[i] = static_cast<uint8_t>((byte & ~3) | (3 - (byte & 3)));
    }
    return order;
}

inline __m512i load_order(const Order& order) {
    return _mm512_load_si512(order.bytes);
}
inline int load_word(const uint8_t* p) {
    int word;
    memcpy(&word, p, sizeof word);
    return word;
}

// Windows of a tile's lanes 16 h .. 16 h + 15 (a: positions 0-3, b: positions 4-7), by load(tile, h, a, b). The word
// before the first is the tile's last: the ring closes, and no load leaves the tile.
template <int Bits>
struct Windows;

// The whole tile is one load.
constexpr Order kOrder2Low = window_order(2, 1, 60);
constexpr Order kOrder2High = window_order(2, 33, 0);
template <>
struct Windows<2> {
    const __m512i low = load_order(kOrder2Low);
    const __m512i high = load_order(kOrder2High);
    void load(const uint8_t* tile, int h, __m512i& a, __m512i& b) const {
        a = b = _mm512_permutexvar_epi8(h ? high : low, load64(tile));
    }
};

// Lanes 0-15 need words 0-11 and the last (23), which takes the place of word 15; lanes 16-31 need words 11-23, loaded
// from word 8 on.
constexpr Order kOrder3LowA = window_order(3, 1, 60);
constexpr Order kOrder3LowB = window_order(3, 2, 60);
constexpr Order kOrder3HighA = window_order(3, 17, 0);
constexpr Order kOrder3HighB = window_order(3, 18, 0);
template <>
struct Windows<3> {
    const __m512i low_a = load_order(kOrder3LowA);
    const __m512i low_b = load_order(kOrder3LowB);
    const __m512i high_a = load_order(kOrder3HighA);
    const __m512i high_b = load_order(kOrder3HighB);
    void load(const uint8_t* tile, int h, __m512i& a, __m512i& b) const {
        const __m512i bytes =
            h ? load64(tile + 32) : _mm512_mask_set1_epi32(load64(tile), 0x8000, load_word(tile + 92));
        a = _mm512_permutexvar_epi8(h ? high_a : low_a, bytes);
        b = _mm512_permutexvar_epi8(h ? high_b : low_b, bytes);
    }
};

// Window b is the lane's own word. Window a needs the low half of the word before: for lane 0 of each load it takes the
// place of the low half of word 15, which no window a needs.
constexpr Order kOrder4 = window_order(4, 1, 60);
template <>
struct Windows<4> {
    const __m512i order = load_order(kOrder4);
    void load(const uint8_t* tile, int h, __m512i& a, __m512i& b) const {
        b = load64(tile + 64 * h);
        const int before = load_word(tile + (h ? 60 : 124));
        const __m512i bytes = _mm512_mask_set1_epi16(b, 1u << 30, static_cast<int16_t>(before));
        a = _mm512_permutexvar_epi8(order, bytes);
    }
};

// How far right state j lies in its window: a ends K (j + 1) bits after its first two bytes; b begins K - 2 bytes
// later.
template <int Bits>
constexpr int shift_of(int j) {
    return j < 4 ? 16 - Bits * (j + 1) : 16 + 8 * (Bits - 2) - Bits * (j + 1);
}

template <int Shift>
inline __m512i product(__m512i window) {
    const __m512i states = _mm512_and_si512(_mm512_srli_epi32(window, Shift), _mm512_set1_epi32(0xffff));
    return _mm512_mullo_epi32(states, _mm512_set1_epi32(static_cast<int>(exl3::kMul1Multiplier)));
}

// Byte sums of states J and J + 1 of every lane, in the low and high 16 bits of its dword.
template <int Bits, int J>
inline __m512i sum_pair(__m512i window) {
    const __m512i ones = _mm512_set1_epi8(1);
    const __m512i second = _mm512_dpbusd_epi32(_mm512_setzero_si512(), product<shift_of<Bits>(J + 1)>(window), ones);
    return _mm512_dpbusd_epi32(_mm512_slli_epi32(second, 16), product<shift_of<Bits>(J)>(window), ones);
}

inline __m512i broadcast8(const int16_t* x) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

// Adds 16 lanes of one tile to the rows: a_sums for columns L / 4, b_sums for columns L / 4 + 8.
template <int Bits, int Rows>
inline void add_lanes(__m512i a, __m512i b, const int16_t* x, ptrdiff_t x_stride, __m512i a_sums[Rows],
                      __m512i b_sums[Rows]) {
    const __m512i a01 = sum_pair<Bits, 0>(a);
    const __m512i b01 = sum_pair<Bits, 4>(b);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const __m512i values = broadcast8(x + r * x_stride);
        a_sums[r] = _mm512_dpwssd_epi32(a_sums[r], a01, values);
        b_sums[r] = _mm512_dpwssd_epi32(b_sums[r], b01, values);
    }
    const __m512i a23 = sum_pair<Bits, 2>(a);
    const __m512i b23 = sum_pair<Bits, 6>(b);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
        const __m512i values = broadcast8(x + r * x_stride + 8);
        a_sums[r] = _mm512_dpwssd_epi32(a_sums[r], a23, values);
        b_sums[r] = _mm512_dpwssd_epi32(b_sums[r], b23, values);
    }
}

// The totals of the four dwords of each column: a0, b0 columns 0-3 and 8-11, a1, b1 4-7 and 12-15.
inline __m512i fold(__m512i a0, __m512i b0, __m512i a1, __m512i b1) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
    const __m512i first = _mm512_add_epi32(_mm512_unpacklo_epi32(a0, b0), _mm512_unpackhi_epi32(a0, b0));
    const __m512i second = _mm512_add_epi32(_mm512_unpacklo_epi32(a1, b1), _mm512_unpackhi_epi32(a1, b1));
    const __m512i sums = _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    return _mm512_permutexvar_epi32(order, sums);
}

inline __m512i start(const Pass& pass, int row) {
    return _mm512_maskz_set1_epi32(0x1111, pass.bias[row * pass.bias_stride]);
}

// [h][0 = a, 1 = b][row]
template <int Rows>
using RowSums = __m512i[2][2][Rows];

template <int Bits, int Rows>
inline void run_pass(const Windows<Bits>& windows, const Pass& pass, RowSums<Rows>& sums) {
    __m512i a;
    __m512i b;
    if constexpr (Rows <= 4) {
        __m512i a0[Rows], b0[Rows], a1[Rows], b1[Rows];
        for (int r = 0; r < Rows; ++r) a0[r] = b0[r] = a1[r] = b1[r] = start(pass, r);
#pragma GCC unroll 1
        for (int i = 0; i < kBlockTiles; ++i) {
            prefetch_tile<Bits>(pass, i);
            const uint8_t* tile = pass.tile + i * pass.tile_stride;
            windows.load(tile, 0, a, b);
            add_lanes<Bits, Rows>(a, b, pass.x + i * 16, pass.x_stride, a0, b0);
            windows.load(tile, 1, a, b);
            add_lanes<Bits, Rows>(a, b, pass.x + i * 16, pass.x_stride, a1, b1);
        }
        for (int r = 0; r < Rows; ++r) {
            sums[0][0][r] = a0[r], sums[0][1][r] = b0[r], sums[1][0][r] = a1[r], sums[1][1][r] = b1[r];
        }
    } else {  // half the lanes at a time: four sums a row would not fit the registers
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            __m512i as[Rows], bs[Rows];
            for (int r = 0; r < Rows; ++r) as[r] = bs[r] = start(pass, r);
#pragma GCC unroll 1
            for (int i = 0; i < kBlockTiles; ++i) {
                if (h == 0) prefetch_tile<Bits>(pass, i);
                windows.load(pass.tile + i * pass.tile_stride, h, a, b);
                add_lanes<Bits, Rows>(a, b, pass.x + i * 16, pass.x_stride, as, bs);
            }
            for (int r = 0; r < Rows; ++r) sums[h][0][r] = as[r], sums[h][1][r] = bs[r];
        }
    }
}

template <int Bits, int Rows>
struct Kernel {
    using Sums = RowSums<Rows>;
    static void multiply(const Gemv& g) { walk<Bits, Rows, Kernel>(g); }
    Windows<Bits> windows;
    void run(const Pass& pass, Sums& sums) { run_pass<Bits, Rows>(windows, pass, sums); }
    static __m512i total(const Sums& sums, int r) {
        return fold(sums[0][0][r], sums[0][1][r], sums[1][0][r], sums[1][1][r]);
    }
};

float quantise(const float* x, const uint16_t* suh, Activations* out, int row, int block) {
    const ptrdiff_t index = row * (out->stride / kBlock) + block;
    return quantise_block_avx2(x, suh, out->values + index * kBlock, out->bias + index, out->scale + index);
}

}  // namespace

const Kernels kAvx512Kernels = {
    "avx512", 1, quantise, {gemv<Kernel, 2>, gemv<Kernel, 3>, gemv<Kernel, 4>}, rotate_out_avx2, swiglu_avx2};

}  // namespace glm53::cpu
