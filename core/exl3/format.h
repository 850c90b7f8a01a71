// The EXL3 format of a quantised linear layer, as exllamav3 stores it.
//
// trellis is uint16 (k/16, n/16, 16 K): tile (i, j) holds rows 16 i.. of k (input features) and columns 16 j.. of n.
// A tile is 256 positions on a ring of 256 K bits. The ring's bits are the tile's bytes read as little-endian uint32
// words, each most significant bit first. Position t adds its K bits at the end of [.., (t + 1) K); its 16-bit state is
// the 16 bits that end there, going round the ring (so every bit pattern is a valid tile). At a half rate K = a + 1/2,
// even positions add a bits and odd ones a + 1. A codebook turns a state into the fp16 weight.
//
// The weight of the layer, y = x W, is diag(suh) H W_inner H diag(svh), with H block-diagonal of 128 x 128 Sylvester
// Hadamard matrices divided by sqrt(128), and suh (k) and svh (n) fp16 sign-and-scale vectors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "exl3/constants.h"

namespace glm53::exl3 {

enum class Codebook { k3inst, kMcg, kMul1 };

// "3inst", "mcg" or "mul1"; throws std::invalid_argument for another name.
Codebook codebook_from_name(std::string_view name);

// Bits per weight, kept doubled so that half rates are exact.
class Rate {
  public:
    // From a trellis's last dimension (uint16 words a tile). Throws std::invalid_argument unless it is 16 K with
    // K = 1..8, 1.5, 2.5 or 3.5.
    static Rate from_words(int64_t words);

    bool whole() const { return doubled_ % 2 == 0; }
    int tile_words() const { return doubled_ * 8; }  // uint16 words
    int tile_bytes() const { return doubled_ * 16; }
    int ring_bits() const { return doubled_ * 128; }
    // New bits of positions 0..t.
    int end_of(int t) const { return doubled_ / 2 * (t + 1) + (whole() ? 0 : (t + 1) / 2); }

  private:
    explicit Rate(int doubled) : doubled_(doubled) {}
    int doubled_;
};

// Row and column inside the tile of ring position t (the B fragment of an m16n8k16 tensor-core product, two 8-column
// halves).
constexpr int row_of(int t) {
    return (t >> 3 & 3) * 2 + (t & 1) + 8 * (t >> 1 & 1);
}
constexpr int column_of(int t) {
    return (t >> 5) + 8 * (t >> 2 & 1);
}

// fp16 bits of the weight that `state` stands for.
uint16_t codebook_value(uint16_t state, Codebook codebook);
// Sum of the four bytes of state * kMul1Multiplier mod 2^32: 0..1020.
constexpr int mul1_byte_sum(uint16_t state) {
    const uint32_t x = state * kMul1Multiplier;
    return static_cast<int>((x & 255u) + (x >> 8 & 255u) + (x >> 16 & 255u) + (x >> 24));
}

// The 256 states of one tile, by ring position. `tile` points at rate.tile_bytes() bytes of any alignment.
void decode_tile(const void* tile, Rate rate, uint16_t states[kTileWeights]);

// States of a whole trellis: (k_tiles, n_tiles, rate.tile_words()) uint16 -> (k_tiles, n_tiles, 256) uint16.
void decode_states(std::span<const uint16_t> trellis, Rate rate, std::span<uint16_t> states);

// W_inner: (k_tiles, n_tiles, rate.tile_words()) uint16 -> (16 k_tiles, 16 n_tiles) fp16 bits, row-major. Half rates
// exist with mul1 only: std::invalid_argument otherwise.
void decode_inner_weight(std::span<const uint16_t> trellis, int64_t k_tiles, int64_t n_tiles, Rate rate,
                         Codebook codebook, std::span<uint16_t> weight);

// Legacy sign words: bit i of words[j] set means that element 16 j + i is -1. `values` (16 words.size()) gets fp16 +-1.
void expand_signs(std::span<const uint16_t> words, std::span<uint16_t> values);

}  // namespace glm53::exl3
