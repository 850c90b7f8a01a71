// AVX2 kernels. A tile column is four "lanes" of eight ring positions; a vector holds two adjacent columns, so lane l
// of column c is dword l of half c & 1. Lane l of column c spans K bytes of the stream and needs the two before them:
// one or two 32-bit windows, from which its eight states are shifted out.
//   positions 0-3: column c,     rows 2 l + {0, 1, 8, 9}
//   positions 4-7: column c + 8, the same rows
// Eight tile rows (one block of activations) are summed in registers per pass.
#include <immintrin.h>

#include "cpu/block_avx2.h"
#include "cpu/by_rows.h"
#include "cpu/kernels.h"
#include "exl3/constants.h"

namespace glm53::cpu {
namespace {

constexpr int kTileValues = 32;  // int16 words of activations for one tile row: each value twice
constexpr int kPairs = 4;        // of adjacent columns with positions 0-3 in a tile

inline __m128i load16(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline __m256i load32(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline __m256i join(__m128i low, __m128i high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
inline __m128i broadcast_word(const uint8_t* p) {
    return _mm_castps_si128(_mm_broadcast_ss(reinterpret_cast<const float*>(p)));
}

// Byte order of a window: byte k of lane l is the stream byte first + K l - k, counted from the start of a 16-byte
// load. The stream runs through each little-endian dword from its top byte down.
template <int Bits>
inline __m256i window_order(int first) {
    alignas(32) int8_t order[32];
    for (int i = 0; i < 32; ++i) {
        const int byte = first + Bits * (i % 16 / 4) - i % 4;
        order[i] = static_cast<int8_t>((byte & ~3) | (3 - (byte & 3)));
    }
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(order));
}

// The windows of columns 2 p and 2 p + 1 (a: positions 0-3, b: positions 4-7). The word before column 0 is the tile's
// last: the ring closes, and no load leaves the tile.
template <int Bits>
struct Windows;

template <>
struct Windows<2> {
    const __m256i order = window_order<2>(9);
    void load(const uint8_t* tile, int p, __m256i& a, __m256i& b) const {
        const __m128i high = load16(tile + 16 * p);
        const __m128i low = p == 0 ? _mm_blend_epi32(_mm_shuffle_epi32(high, 0x40), broadcast_word(tile + 60), 2)
                                   : load16(tile + 16 * p - 8);
        a = b = _mm256_shuffle_epi8(join(low, high), order);
    }
};

template <>
struct Windows<3> {
    const __m256i order_a = window_order<3>(5);
    const __m256i order_b = window_order<3>(6);
    void load(const uint8_t* tile, int p, __m256i& a, __m256i& b) const {
        const __m128i low = p == 0
                                ? _mm_blend_epi32(_mm_shuffle_epi32(load16(tile), 0x90), broadcast_word(tile + 92), 1)
                                : load16(tile + 24 * p - 4);
        const __m256i bytes = join(low, load16(tile + 24 * p + 8));
        a = _mm256_shuffle_epi8(bytes, order_a);
        b = _mm256_shuffle_epi8(bytes, order_b);
    }
};

template <>
struct Windows<4> {
    const __m256i back = _mm256_setr_epi32(0, 0, 1, 2, 3, 4, 5, 6);
    void load(const uint8_t* tile, int p, __m256i& a, __m256i& b) const {
        b = load32(tile + 32 * p);
        const __m256i before = p == 0 ? _mm256_blend_epi32(_mm256_permutevar8x32_epi32(b, back),
                                                           _mm256_castsi128_si256(broadcast_word(tile + 124)), 1)
                                      : load32(tile + 32 * p - 4);
        a = _mm256_blend_epi16(_mm256_slli_epi32(before, 16), _mm256_srli_epi32(b, 16), 0x55);
    }
};

// How far right state j lies in its window: a ends K (j + 1) bits after its first two bytes; b begins K - 2 bytes
// later.
template <int Bits>
constexpr int shift_of(int j) {
    return j < 4 ? 16 - Bits * (j + 1) : 16 + 8 * (Bits - 2) - Bits * (j + 1);
}

// Sums of bytes 0-1 and of bytes 2-3 of every state's product, as int16 pairs.
inline __m256i byte_pairs(__m256i window, int shift) {
    const __m256i states = _mm256_and_si256(_mm256_srli_epi32(window, shift), _mm256_set1_epi32(0xffff));
    const __m256i product = _mm256_mullo_epi32(states, _mm256_set1_epi32(static_cast<int>(exl3::kMul1Multiplier)));
    return _mm256_maddubs_epi16(product, _mm256_set1_epi8(1));
}

inline __m256i broadcast8(const int16_t* x) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

// Adds four states (positions 4 half .. + 3) of one column pair to one row; x is in the one-row order.
template <int Bits, int Half>
inline void add_one_row(__m256i window, const int16_t* x, __m256i& sum) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m256i pairs = byte_pairs(window, shift_of<Bits>(4 * Half + j));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, broadcast8(x + 8 * j)));
    }
}

// The same for several rows: the byte sums of two positions share a vector, one multiply-add per row.
template <int Bits, int Half, int Rows>
inline void add_rows(__m256i window, const int16_t* x, ptrdiff_t row_stride, __m256i sum[Rows]) {
#pragma GCC unroll 2
    for (int j = 0; j < 4; j += 2) {
        const __m256i first = byte_pairs(window, shift_of<Bits>(4 * Half + j));
        const __m256i second = byte_pairs(window, shift_of<Bits>(4 * Half + j + 1));
        const __m256i sums = _mm256_hadd_epi16(first, second);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const __m256i product = _mm256_madd_epi16(sums, load32(x + r * row_stride + 8 * j));
            sum[r] = _mm256_add_epi32(sum[r], product);
        }
    }
}

// Position of a pass: eight tiles down from `tile`, and their activations.
struct Pass {
    const uint8_t* tile;
    ptrdiff_t tile_stride;  // bytes to the tile below
    const int16_t* x;
    ptrdiff_t x_stride;  // words to the next row
    const int32_t* bias;
    ptrdiff_t bias_stride;
};

inline __m256i start(const Pass& pass, int row) {
    const int bias = pass.bias[row * pass.bias_stride];
    return _mm256_setr_epi32(bias, 0, 0, 0, bias, 0, 0, 0);
}

// Sums of one pass over the columns of pair p: sums[half][row].
template <int Bits, int Rows>
inline void sum_pair(const Windows<Bits>& windows, const Pass& pass, int p, __m256i sums[2][Rows]) {
    __m256i a;
    __m256i b;
    if constexpr (Rows == 1) {
        __m256i sum_a = start(pass, 0);
        __m256i sum_b = sum_a;
#pragma GCC unroll 1
        for (int i = 0; i < kBlockTiles; ++i) {
            windows.load(pass.tile + i * pass.tile_stride, p, a, b);
            add_one_row<Bits, 0>(a, pass.x + i * kTileValues, sum_a);
            add_one_row<Bits, 1>(b, pass.x + i * kTileValues, sum_b);
        }
        sums[0][0] = sum_a;
        sums[1][0] = sum_b;
    } else if constexpr (Rows <= 4) {
        __m256i sum_a[Rows];
        __m256i sum_b[Rows];
        for (int r = 0; r < Rows; ++r) sum_a[r] = sum_b[r] = start(pass, r);
#pragma GCC unroll 1
        for (int i = 0; i < kBlockTiles; ++i) {
            windows.load(pass.tile + i * pass.tile_stride, p, a, b);
            add_rows<Bits, 0, Rows>(a, pass.x + i * kTileValues, pass.x_stride, sum_a);
            add_rows<Bits, 1, Rows>(b, pass.x + i * kTileValues, pass.x_stride, sum_b);
        }
        for (int r = 0; r < Rows; ++r) sums[0][r] = sum_a[r], sums[1][r] = sum_b[r];
    } else {  // one half at a time: sixteen sums would not fit the registers
        __m256i sum[Rows];
        for (int r = 0; r < Rows; ++r) sum[r] = start(pass, r);
#pragma GCC unroll 1
        for (int i = 0; i < kBlockTiles; ++i) {
            windows.load(pass.tile + i * pass.tile_stride, p, a, b);
            add_rows<Bits, 0, Rows>(a, pass.x + i * kTileValues, pass.x_stride, sum);
        }
        for (int r = 0; r < Rows; ++r) sums[0][r] = sum[r], sum[r] = start(pass, r);
#pragma GCC unroll 1
        for (int i = 0; i < kBlockTiles; ++i) {
            windows.load(pass.tile + i * pass.tile_stride, p, a, b);
            add_rows<Bits, 1, Rows>(b, pass.x + i * kTileValues, pass.x_stride, sum);
        }
        for (int r = 0; r < Rows; ++r) sums[1][r] = sum[r];
    }
}

// y (8 columns) += scale * the four-lane totals of four column pairs.
inline void add_columns(__m256i p0, __m256i p1, __m256i p2, __m256i p3, float scale, float* y) {
    const __m256i totals = _mm256_hadd_epi32(_mm256_hadd_epi32(p0, p1), _mm256_hadd_epi32(p2, p3));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256 values = _mm256_cvtepi32_ps(_mm256_permutevar8x32_epi32(totals, order));
    _mm256_storeu_ps(y, _mm256_fmadd_ps(values, _mm256_set1_ps(scale), _mm256_loadu_ps(y)));
}

template <int Bits, int Rows>
struct Kernel {
    static void multiply(const Gemv& g);
};

template <int Bits, int Rows>
void Kernel<Bits, Rows>::multiply(const Gemv& g) {
    constexpr int kTileBytes = 32 * Bits;
    const Windows<Bits> windows;
    const ptrdiff_t row_bytes = static_cast<ptrdiff_t>(g.n_tiles) * kTileBytes;
    const ptrdiff_t blocks = g.x.stride / kBlock;
    for (int block = g.block_begin; block < g.block_end; ++block) {
        const ptrdiff_t k = static_cast<ptrdiff_t>(block) * kBlockTiles;
        const uint8_t* row = g.trellis + k * row_bytes;
        for (int n = g.n_begin; n < g.n_end; ++n) {
            const uint8_t* tile = row + static_cast<ptrdiff_t>(n) * kTileBytes;
            const int16_t* x = g.x.values + k * kTileValues;
            const Pass pass{tile, row_bytes, x, 2 * g.x.stride, g.x.bias + block, blocks};
            __m256i sums[kPairs][2][Rows];
#pragma GCC unroll 4
            for (int p = 0; p < kPairs; ++p) sum_pair<Bits, Rows>(windows, pass, p, sums[p]);
            for (int r = 0; r < Rows; ++r) {
                const float scale = g.x.scale[r * blocks + block];
                float* y = g.y + r * g.y_stride + n * exl3::kTileSide;
                for (int half = 0; half < 2; ++half) {
                    add_columns(sums[0][half][r], sums[1][half][r], sums[2][half][r], sums[3][half][r], scale,
                                y + 8 * half);
                }
            }
        }
    }
}

// Order of a tile row's 16 values, each twice. One row: per position j = 0..3 its four rows' values, each for the two
// byte pairs of a state. Several: positions (0, 1), then (2, 3), four values each, once for each half of a vector.
float quantise(const float* x, const uint16_t* suh, Activations* out, int row, int block) {
    alignas(32) int16_t natural[kBlock];
    const ptrdiff_t index = row * (out->stride / kBlock) + block;
    const float offset = quantise_block_avx2(x, suh, natural, out->bias + index, out->scale + index);
    const __m128i even = _mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
    const __m128i odd = _mm_setr_epi8(2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15);
    const __m128i split = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m128i first = out->one_row ? even : split;
    const __m128i second = out->one_row ? odd : split;
    int16_t* target = out->values + index * kBlock * 2;
    for (int i = 0; i < kBlock / 8; ++i) {
        const __m128i v = _mm_load_si128(reinterpret_cast<const __m128i*>(natural + 8 * i));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target + 16 * i), _mm_shuffle_epi8(v, first));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(target + 16 * i + 8), _mm_shuffle_epi8(v, second));
    }
    return offset;
}

}  // namespace

const Kernels kAvx2Kernels = {
    "avx2", 2, quantise, {gemv<Kernel, 2>, gemv<Kernel, 3>, gemv<Kernel, 4>}, rotate_out_avx2, swiglu_avx2};

}  // namespace glm53::cpu
