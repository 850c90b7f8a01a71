// One-row products on a tile unit (AMX int8), fed by 16-bit AVX-512 lanes (internal; only for files compiled with the
// AVX-512 flags). `Tiles` is the unit: the processor's, or a model of it for tests. The vector ports decode the trellis
// into the four bytes of every weight's product; the unit adds these up, times the activations.
//
// B (16 rows of 64 unsigned bytes): what two trellis tiles, one below the other, hold in columns 8 h .. 8 h + 7. Row
// 8 t + 2 (q / 2) + {low, high} is that half of the products of quad q (quads_avx512.h) of the upper (t = 0) or lower
// tile. Dword n of a row is two states of column n / 2 + 8 h: rows 2 (q / 2) + {0, 1}, + 8 where n is odd.
// A (6 rows of 64 signed bytes): the activations of such a pair of tiles. Which ones a dword wants depends on n % 2, so
// each of the three digits of an activation, x = 256 high + low + 128 extra, has two rows: 2 digit + n % 2.
// C (6 rows of 16 int32): C[m][n] is what row m of A makes of dword n; only n % 2 = m % 2 has a meaning.
//
// extra is 0 or 1, and not 0 only for x > 32639. A block whose greatest value is that is negated, with its scale and
// its bias, so that nothing changes; extra counts only where the negated one has such a value too. All is exact in
// integers modulo 2^32.
//
// A chunk is two trellis tiles side by side times two below each other: four B tiles, one A tile, four C tiles. While
// a chunk is decoded, the one before is multiplied: its loads find stores that have left the store buffer, and vector
// ports and tile unit work side by side. Four chunks are a block of activations; then the C tiles are stored, and what
// they hold is added to y two chunks later.
#pragma once
#include <immintrin.h>

#include "cpu/kernels.h"
#include "cpu/quads_avx512.h"

namespace glm53::cpu {
namespace {

constexpr int kChunks = 4;        // of a block: pairs of tile rows
constexpr int kRing = 2;          // chunks in scratch memory
constexpr int kTileBytes = 1024;  // of an A, B or C tile
constexpr int kDigits = 3;
constexpr int kLargestTwoDigits = 32639;  // 256 * 127 + 127

// The operand of ldtilecfg, palette 1: tiles 0-3 are C, 4 and 5 A, 6 and 7 B.
struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {6, 6, 6, 6, 6, 6, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Pairs<Bits> and multiply_quad() with every constant named one by one: g++ keeps no array of them in registers.
template <int Bits>
struct TileDecoder {
    static constexpr int kPairs = Pairs<Bits>::kCount;
    __m512i order0 = order(0), order1 = order(1), order2 = order(2), order3 = order(3);
    __m512i field0 = field(0), field1 = field(1), field2 = field(2), field3 = field(3);
    __m512i field4 = field(4), field5 = field(5), field6 = field(6), field7 = field(7);
    __m512i low_factor = hidden(_mm512_set1_epi16(static_cast<int16_t>(exl3::kMul1Multiplier & 0xffff)));
    __m512i high_factor = hidden(_mm512_set1_epi16(static_cast<int16_t>(exl3::kMul1Multiplier >> 16)));

    // The compiler is not to know the values, lest it load them each time.
    static __m512i hidden(__m512i v) {
        asm("" : "+v"(v));
        return v;
    }
    static __m512i order(int pair) { return hidden(_mm512_load_si512(PairOrders<Bits>::kOrders[pair].dwords)); }
    static __m512i field(int quad) { return hidden(_mm512_set1_epi64(static_cast<int64_t>(quad_fields(Bits, quad)))); }

    // A trellis tile as half a B tile each for columns 0-7 (at `out`) and 8-15 (a tile further).
    __attribute__((always_inline)) void decode(const uint8_t* tile, uint8_t* out) const {
        const __m512i low = load64(tile);
        const __m512i high = load64(tile + 32 * Bits - 64);
        const __m512i pair0 = _mm512_permutex2var_epi32(low, order0, high);
        const __m512i pair1 = _mm512_permutex2var_epi32(low, order1, high);
        const __m512i pair2 = kPairs > 2 ? _mm512_permutex2var_epi32(low, order2, high) : pair1;
        const __m512i pair3 = kPairs > 3 ? _mm512_permutex2var_epi32(low, order3, high) : pair2;
        const auto quad = [&]<int Q>(__m512i fields) __attribute__((always_inline)) {
            constexpr int kPair = pair_of(Bits, Q);
            const __m512i pair = kPair == 0 ? pair0 : kPair == 1 ? pair1 : kPair == 2 ? pair2 : pair3;
            const __m512i states = _mm512_multishift_epi64_epi8(fields, pair);
            uint8_t* row = out + Q % 2 * kTileBytes + Q / 2 * 128;
            _mm512_store_si512(row, _mm512_mullo_epi16(states, low_factor));
            _mm512_store_si512(row + 64, _mm512_add_epi16(_mm512_mulhi_epu16(states, low_factor),
                                                          _mm512_mullo_epi16(states, high_factor)));
        };
        quad.template operator()<0>(field0);
        quad.template operator()<1>(field1);
        quad.template operator()<2>(field2);
        quad.template operator()<3>(field3);
        quad.template operator()<4>(field4);
        quad.template operator()<5>(field5);
        quad.template operator()<6>(field6);
        quad.template operator()<7>(field7);
    }
};

// One block of activations as A tiles.
struct TileBlock {
    alignas(64) int8_t a[kChunks][2 * kDigits][64];
    int32_t bias;
    float scale;
    bool extra;  // not all third digits are zero
};

struct alignas(64) TileScratch {
    uint8_t ring[kRing][4][kTileBytes];  // chunk, 2 column of trellis tiles + half
    int32_t c[4][2 * kDigits][16];
    TileBlock blocks[3];  // a narrow call still adds up the one before the last when the next is made
};

struct DigitOrder {
    alignas(64) uint8_t bytes[64];
};
// From 32 words (two trellis tiles' activations) to the 64 bytes of a row of A.
constexpr DigitOrder digit_order(int odd) {
    DigitOrder order{};
    for (int k = 0; k < 64; ++k) {
        const int word = 16 * (k / 32) + 8 * odd + 2 * (k / 8 % 4) + k / 2 % 2;
        order.bytes[k] = static_cast<uint8_t>(2 * word);
    }
    return order;
}
constexpr DigitOrder kDigitOrders[2] = {digit_order(0), digit_order(1)};

// x: 128 values in their natural order, with their bias and scale.
inline void set_block(const int16_t* x, int32_t bias, float scale, TileBlock& block) {
    __m512i values[kChunks];
    for (int p = 0; p < kChunks; ++p) values[p] = _mm512_loadu_si512(x + 32 * p);
    const __m512i top = _mm512_set1_epi16(kLargestTwoDigits);
    uint32_t above = 0;
    for (const __m512i& v : values) above |= _mm512_cmpgt_epi16_mask(v, top);
    if (above != 0) {
        for (__m512i& v : values) v = _mm512_sub_epi16(_mm512_setzero_si512(), v);
    }
    block.bias = above != 0 ? -bias : bias;
    block.scale = above != 0 ? -scale : scale;
    block.extra = false;
    for (int p = 0; p < kChunks; ++p) {
        const __mmask32 over = _mm512_cmpgt_epi16_mask(values[p], top);
        const __m512i high = _mm512_srai_epi16(_mm512_adds_epi16(values[p], _mm512_set1_epi16(128)), 8);
        const __m512i extra = _mm512_maskz_set1_epi16(over, 1);
        const __m512i rest = _mm512_sub_epi16(values[p], _mm512_slli_epi16(high, 8));
        const __m512i low = _mm512_sub_epi16(rest, _mm512_slli_epi16(extra, 7));
        const __m512i digits[kDigits] = {high, low, extra};
        block.extra |= over != 0;
        for (int row = 0; row < 2 * kDigits; ++row) {
            const __m512i order = _mm512_load_si512(kDigitOrders[row % 2].bytes);
            _mm512_store_si512(block.a[p][row], _mm512_permutexvar_epi8(order, digits[row / 2]));
        }
    }
}

// Two tile columns of a block; one without a block is none.
struct TilePair {
    const uint8_t* tiles = nullptr;  // the upper left one
    uintptr_t prefetch = 0;          // what a later pair reads; may lie outside the tensor, which a prefetch forgives
    const TileBlock* block = nullptr;
    int n = 0;
    int width = 0;  // 1 at an odd end: then the second column is the first again, and its sums are dropped
};

template <class Tiles, int Bits>
class TileProduct {
  public:
    TileProduct(const Gemv& g, TileScratch& scratch) : g_(g), s_(scratch), row_bytes_(g.n_tiles * kTrellisTile) {}

    void run() {
        const TileConfig config;
        Tiles::configure(config);
        TileDecoder<Bits> decoder;  // not const: g++ would keep it in memory
        Course course;              // a local that nobody else sees stays in registers across the tile instructions
        for (int b = g_.block_begin; b < g_.block_end; ++b) {
            TileBlock& block = s_.blocks[b % 3];
            set_block(g_.x.values + b * kBlock, g_.x.bias[b], g_.x.scale[b], block);
            for (int n = g_.n_begin; n < g_.n_end; n += 2) {
                course.now = pair(b, n, block);
                run_pair<true>(decoder, course);
            }
        }
        course.now = {};
        run_pair<false>(decoder, course);
        run_pair<false>(decoder, course);
        Tiles::release();
    }

  private:
    static constexpr ptrdiff_t kTrellisTile = 32 * Bits;
    struct Course {
        TilePair now, before, stored;  // stored: in the C tiles' memory, to be added to y
    };

    TilePair pair(int b, int n, const TileBlock& block) const {
        const uint8_t* row = g_.trellis + b * kBlockTiles * row_bytes_;
        const int width = g_.n_end - g_.n_begin;
        const int ahead = kPrefetchTiles < width ? kPrefetchTiles : width;
        const bool below = n + ahead >= g_.n_end;
        const uintptr_t prefetch =
            reinterpret_cast<uintptr_t>(row) + static_cast<uintptr_t>((below ? kBlockTiles * row_bytes_ : 0) +
                                                                      (n + ahead - (below ? width : 0)) * kTrellisTile);
        return {row + n * kTrellisTile, prefetch, &block, n, g_.n_end - n < 2 ? 1 : 2};
    }

    template <bool Decode>
    __attribute__((always_inline)) void run_pair(const TileDecoder<Bits>& decoder, Course& course) {
        step<0, Decode>(decoder, course);
        step<1, Decode>(decoder, course);
        step<2, Decode>(decoder, course);
        step<3, Decode>(decoder, course);
        course.before = course.now;
    }

    // Decodes chunk P of course.now, multiplies the chunk before.
    template <int P, bool Decode>
    __attribute__((always_inline)) void step(const TileDecoder<Bits>& decoder, Course& course) {
        constexpr int kChunk = (P + kChunks - 1) % kChunks;
        const TilePair& multiplied = P > 0 ? course.now : course.before;
        uint8_t* out = s_.ring[P % kRing][0];
        const uint8_t* b = s_.ring[kChunk % kRing][0];
        const bool any = multiplied.block != nullptr;
        if constexpr (Decode) decode<P, 0, 0>(decoder, course.now, out);
        if (any) Tiles::template load<4 + kChunk % 2>(multiplied.block->a[kChunk]);
        multiply<kChunk, 0>(b, any);
        if constexpr (Decode) decode<P, 0, 1>(decoder, course.now, out);
        multiply<kChunk, 1>(b, any);
        if constexpr (Decode) decode<P, 1, 0>(decoder, course.now, out);
        multiply<kChunk, 2>(b, any);
        if constexpr (Decode) decode<P, 1, 1>(decoder, course.now, out);
        multiply<kChunk, 3>(b, any);
        if constexpr (kChunk == 0) course.stored = course.before;
        if constexpr (kChunk == 2) {
            if (course.stored.block != nullptr) add(course.stored);
            course.stored.block = nullptr;
        }
    }

    template <int P, int Column, int Lower>
    __attribute__((always_inline)) void decode(const TileDecoder<Bits>& decoder, const TilePair& now,
                                               uint8_t* out) const {
        constexpr int kRow = 2 * P + Lower;
        if constexpr (Column == 0) {
            const char* p = reinterpret_cast<const char*>(now.prefetch + static_cast<uintptr_t>(kRow * row_bytes_));
#pragma GCC unroll 4
            for (int line = 0; line < Bits; ++line) _mm_prefetch(p + 64 * line, _MM_HINT_T0);
        }
        const uint8_t* tile = now.tiles + kRow * row_bytes_ + (Column && now.width == 2 ? kTrellisTile : 0);
        decoder.decode(tile, out + Column * 2 * kTileBytes + Lower * (kTileBytes / 2));
    }

    template <int Chunk, int C>
    __attribute__((always_inline)) void multiply(const uint8_t* b, bool any) {
        if constexpr (Chunk == 0) {  // the pair before is complete
            Tiles::template store<C>(s_.c[C]);
            Tiles::template zero<C>();
        }
        if (!any) return;
        Tiles::template load<6 + C % 2>(b + C * kTileBytes);
        Tiles::template multiply<C, 4 + Chunk % 2, 6 + C % 2>();
    }

    // y += scale * (256 high + low + 128 extra + bias)
    __attribute__((always_inline)) void add(const TilePair& done) const {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        const TileBlock& block = *done.block;
        for (int column = 0; column < done.width; ++column) {
            __m512i sums[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const int32_t (*c)[16] = s_.c[2 * column + half];
                sums[half] = _mm512_add_epi32(_mm512_slli_epi32(either(c), 8), either(c + 2));
                if (block.extra) sums[half] = _mm512_add_epi32(sums[half], _mm512_slli_epi32(either(c + 4), 7));
            }
            const __m512i bias = _mm512_set1_epi32(block.bias);
            const __m512i totals =
                _mm512_add_epi32(_mm512_add_epi32(_mm512_permutex2var_epi32(sums[0], even, sums[1]), bias),
                                 _mm512_permutex2var_epi32(sums[0], odd, sums[1]));
            add_totals(totals, block.scale, g_.y + (done.n + column) * exl3::kTileSide);
        }
    }
    // Even dwords of the first row, odd ones of the second.
    static __m512i either(const int32_t (*c)[16]) {
        return _mm512_mask_blend_epi32(0xaaaa, _mm512_load_si512(c[0]), _mm512_load_si512(c[1]));
    }

    const Gemv& g_;
    TileScratch& s_;
    const ptrdiff_t row_bytes_;
};

// Gemv of one row, whose values lie in their natural order.
template <class Tiles, int Bits>
void tile_gemv(const Gemv& g) {
    static thread_local TileScratch scratch;
    if (g.block_begin >= g.block_end || g.n_begin >= g.n_end) return;
    TileProduct<Tiles, Bits>(g, scratch).run();
}

}  // namespace
}  // namespace glm53::cpu
