// One-row products on a tile unit (AMX int8), fed by 16-bit AVX-512 lanes (internal; only for files compiled with the
// AVX-512 flags). `Tiles` is the unit: the processor's, or a model of it for tests.
//
// The vector ports only make the products of the states; their byte sums times the activations are what the unit does.
// 16 tile columns of one tile row are a "group": a quad of each (quads_avx512.h), low or high halves of its products,
// is one row of 64 unsigned bytes of tile A. Tile B holds the activations of the quad's rows as two signed bytes, x =
// 256 high + low: column c the high ones of matrix column c (or c + 8, for odd quads), column c + 8 the low ones, with
// zeros where A holds other columns. Quads 2 u and 2 u + 1 share B. A step makes two quads of a group (u of tile row i)
// while the unit takes the step before: what it reads was stored long enough ago to have left the store buffer.
//
// x = 32640 .. 32767 has no such two bytes; a block that holds some is negated, and one that holds -32767 .. -32640 too
// goes to the 16-bit lanes alone. Rounding makes one value of a block +-32767, so this is common to the first and rare
// to the second.
#pragma once
#include <immintrin.h>
#include <string.h>

#include "cpu/kernels.h"
#include "cpu/quads_avx512.h"

namespace glm53::cpu {
namespace {

constexpr int kGroup = 16;            // tile columns: the rows of A
constexpr int kTileBytes = 16 * 64;   // of A, B or a tile of sums
constexpr int kSteps = 4;             // of a tile row
constexpr int kAheadRows = 3;         // tile rows that the prefetch runs ahead
constexpr int kLargestSplit = 32639;  // 256 * 127 + 127

struct alignas(64) TileScratch {
    uint8_t a[kSteps][4][kTileBytes];             // by step: quad 2 u low, high, quad 2 u + 1 low, high
    uint8_t b[kBlockTiles * kSteps][kTileBytes];  // of a block; all but what set_activations() writes stays zero
    int32_t sums[4][kGroup][16];                  // even quads low, high, odd quads low, high
};

template <int Bits, int U>
inline void decode_step(const Pairs<Bits>& pairs, const uint8_t* tile, uint8_t (*a)[kTileBytes], int column) {
    constexpr int kFirst = pair_of(Bits, 2 * U), kSecond = pair_of(Bits, 2 * U + 1);
    const __m512i first = pairs.load(tile, kFirst);
    const __m512i second = kFirst == kSecond ? first : pairs.load(tile, kSecond);
    const Products even = multiply_quad<Bits, 2 * U>(first);
    const Products odd = multiply_quad<Bits, 2 * U + 1>(second);
    _mm512_store_si512(a[0] + 64 * column, even.low);
    _mm512_store_si512(a[1] + 64 * column, even.high);
    _mm512_store_si512(a[2] + 64 * column, odd.low);
    _mm512_store_si512(a[3] + 64 * column, odd.high);
}

// What a step reads: tile row i of the group, and where a later one lies.
struct TileRow {
    const uint8_t* tiles;
    uintptr_t ahead;  // may lie outside the tensor, which a prefetch forgives
    int width;        // tile columns; 0: nothing left to decode
};

// Decodes step `step` (u = U) of a group, four columns at a time, and multiplies the step before in between.
template <class Tiles, int Bits, int U>
inline void run_step(const Pairs<Bits>& pairs, const TileRow& row, TileScratch& s, int step) {
    const auto decode = [&](int begin) {
        const int end = begin + 4 < row.width ? begin + 4 : row.width;
#pragma GCC unroll 1
        for (int j = begin; j < end; ++j) {
            if constexpr (U == 0) {
                const char* line = reinterpret_cast<const char*>(row.ahead + static_cast<uintptr_t>(j * 32 * Bits));
                _mm_prefetch(line, _MM_HINT_T0);
                _mm_prefetch(line + 32 * Bits - 32, _MM_HINT_T0);
            }
            decode_step<Bits, U>(pairs, row.tiles + j * 32 * Bits, s.a[U], j);
        }
    };
    const bool multiply = step > 0;
    const uint8_t (*a)[kTileBytes] = s.a[(U + kSteps - 1) % kSteps];
    decode(0);
    if (multiply) {
        Tiles::template load<6>(s.b[step - 1]);
        Tiles::template load<4>(a[0]);
        Tiles::template multiply<0, 4, 6>();
    }
    decode(4);
    if (multiply) {
        Tiles::template load<5>(a[1]);
        Tiles::template multiply<1, 5, 6>();
    }
    decode(8);
    if (multiply) {
        Tiles::template load<4>(a[2]);
        Tiles::template multiply<2, 4, 6>();
    }
    decode(12);
    if (multiply) {
        Tiles::template load<5>(a[3]);
        Tiles::template multiply<3, 5, 6>();
    }
}

// Writes the B tiles of a block (x: 128 values in the order of the 16-bit lanes). The sign that x was taken with; 0 if
// neither fits.
inline int set_activations(const int16_t* x, TileScratch& s) {
    int largest = x[0];
    int smallest = x[0];
    for (int i = 1; i < kBlock; ++i) {
        largest = x[i] > largest ? x[i] : largest;
        smallest = x[i] < smallest ? x[i] : smallest;
    }
    if (largest > kLargestSplit && smallest < -kLargestSplit) return 0;
    const int sign = largest > kLargestSplit ? -1 : 1;
    for (int step = 0; step < kBlockTiles * kSteps; ++step) {
        int64_t four;
        memcpy(&four, x + 4 * step, sizeof four);
        __m512i values = _mm512_set1_epi64(four);
        if (sign < 0) values = _mm512_sub_epi16(_mm512_setzero_si512(), values);
        // Each half twice, for the two bytes of a product's half.
        const __m512i low = _mm512_shuffle_epi8(values, _mm512_set1_epi64(0x0606040402020000));
        const __m512i high = _mm512_shuffle_epi8(_mm512_add_epi16(values, _mm512_set1_epi16(128)),
                                                 _mm512_set1_epi64(0x0707050503030101));
        const __m512i halves = _mm512_mask_mov_epi32(high, 0xff00, low);
        const __m512i first = _mm512_shuffle_epi32(halves, _MM_PERM_CCAA);
        const __m512i second = _mm512_shuffle_epi32(halves, _MM_PERM_DDBB);
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) {
            const __mmask16 columns = static_cast<__mmask16>(0x0101u << c);
            _mm512_mask_store_epi32(s.b[step] + 128 * c, columns, first);
            _mm512_mask_store_epi32(s.b[step] + 128 * c + 64, columns, second);
        }
    }
    return sign;
}

// y += the sums of a group of `width` tile columns from column n on.
template <class Tiles>
inline void add_group(const Gemv& g, TileScratch& s, int block, int n, int width, int sign) {
    Tiles::template store<0>(s.sums[0]);
    Tiles::template store<1>(s.sums[1]);
    Tiles::template store<2>(s.sums[2]);
    Tiles::template store<3>(s.sums[3]);
    const __m512i bias = _mm512_set1_epi32(g.x.bias[block]);
    for (int j = 0; j < width; ++j) {
        __m256i columns[2];
        for (int odd = 0; odd < 2; ++odd) {
            const __m512i halves =
                _mm512_add_epi32(_mm512_load_si512(s.sums[2 * odd][j]), _mm512_load_si512(s.sums[2 * odd + 1][j]));
            columns[odd] = _mm256_add_epi32(_mm256_slli_epi32(_mm512_castsi512_si256(halves), 8),
                                            _mm512_extracti64x4_epi64(halves, 1));
        }
        const __m512i sums = _mm512_inserti64x4(_mm512_castsi256_si512(columns[0]), columns[1], 1);
        const __m512i totals = sign < 0 ? _mm512_sub_epi32(bias, sums) : _mm512_add_epi32(bias, sums);
        add_totals(totals, g.x.scale[block], g.y + (n + j) * exl3::kTileSide);
    }
}

template <class Tiles, int Bits>
inline void run_group(const Pairs<Bits>& pairs, const Gemv& g, TileScratch& s, int block, int n) {
    const ptrdiff_t row_bytes = static_cast<ptrdiff_t>(g.n_tiles) * 32 * Bits;
    const int width = g.n_end - n < kGroup ? g.n_end - n : kGroup;
    const uint8_t* first = g.trellis + block * kBlockTiles * row_bytes + static_cast<ptrdiff_t>(n) * 32 * Bits;
    const bool last = n + kGroup >= g.n_end;
    const uintptr_t next =
        reinterpret_cast<uintptr_t>(first) +
        static_cast<uintptr_t>(last ? kBlockTiles * row_bytes + (g.n_begin - n) * 32 * Bits : kGroup * 32 * Bits);
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    for (int i = 0; i < kBlockTiles; ++i) {
        const int later = i + kAheadRows;
        const uintptr_t ahead = later < kBlockTiles
                                    ? reinterpret_cast<uintptr_t>(first) + static_cast<uintptr_t>(later * row_bytes)
                                    : next + static_cast<uintptr_t>((later - kBlockTiles) * row_bytes);
        const TileRow row{first + i * row_bytes, ahead, width};
        run_step<Tiles, Bits, 0>(pairs, row, s, kSteps * i);
        run_step<Tiles, Bits, 1>(pairs, row, s, kSteps * i + 1);
        run_step<Tiles, Bits, 2>(pairs, row, s, kSteps * i + 2);
        run_step<Tiles, Bits, 3>(pairs, row, s, kSteps * i + 3);
    }
    run_step<Tiles, Bits, 0>(pairs, {first, next, 0}, s, kSteps * kBlockTiles);
}

// Gemv of one row; `lanes` is the same in 16-bit lanes.
template <class Tiles, int Bits>
void tile_gemv(const Gemv& args, void (*lanes)(const Gemv*)) {
    TileScratch s;
    memset(s.b, 0, sizeof s.b);
    Gemv g = args;
    const Pairs<Bits> pairs;
    Tiles::configure();
    for (int block = args.block_begin; block < args.block_end; ++block) {
        const int sign = set_activations(g.x.values + block * kBlock, s);
        if (sign == 0) {
            g.block_begin = block;
            g.block_end = block + 1;
            lanes(&g);
            continue;
        }
        for (int n = g.n_begin; n < g.n_end; n += kGroup) {
            run_group<Tiles, Bits>(pairs, g, s, block, n);
            add_group<Tiles>(g, s, block, n, g.n_end - n < kGroup ? g.n_end - n : kGroup, sign);
        }
    }
    Tiles::release();
}

}  // namespace
}  // namespace glm53::cpu
