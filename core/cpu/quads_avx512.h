// How an EXL3 tile is taken apart in 16-bit lanes (internal; only for files compiled with the AVX-512 flags).
//
// A tile is eight "groups" of K dwords, 32 states each: group i holds column i (states 0-3, 8-11, 16-19, 24-27) and
// column i + 8 (the others). A vector holds one "quad" (four states in a row) of every group: quad q is
//   column i + 8 (q % 2), rows 2 (q / 2) + {0, 1, 8, 9}
// in 64-bit element i. Two dwords of the stream side by side hold every state that ends in them 16 bits or more from
// their start, and the bits of such a pair run on from the low end of the first dword to the high end of the second,
// as a rotation of the element does: one multishift takes a quad out of it, whatever its alignment.
#pragma once
#include <immintrin.h>

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
struct Pairs {
    static constexpr int kCount = pair_of(Bits, kQuads - 1) + 1;
    __m512i orders[kCount];

    Pairs() {
        for (int p = 0; p < kCount; ++p) orders[p] = _mm512_load_si512(PairOrders<Bits>::kOrders[p].dwords);
    }
    // Pair p of every group of a tile.
    __m512i load(const uint8_t* tile, int p) const {
        return _mm512_permutex2var_epi32(load64(tile), orders[p], load64(tile + 32 * Bits - 64));
    }
};

// The 32-bit products of a quad's states in halves.
struct Products {
    __m512i low, high;
};
template <int Bits, int Quad>
inline Products multiply_quad(__m512i pair) {
    const __m512i fields = _mm512_set1_epi64(static_cast<int64_t>(quad_fields(Bits, Quad)));
    const __m512i states = _mm512_multishift_epi64_epi8(fields, pair);
    const __m512i low_factor = _mm512_set1_epi16(static_cast<int16_t>(exl3::kMul1Multiplier & 0xffff));
    const __m512i high_factor = _mm512_set1_epi16(static_cast<int16_t>(exl3::kMul1Multiplier >> 16));
    return {_mm512_mullo_epi16(states, low_factor),
            _mm512_add_epi16(_mm512_mulhi_epu16(states, low_factor), _mm512_mullo_epi16(states, high_factor))};
}

}  // namespace
}  // namespace glm53::cpu
