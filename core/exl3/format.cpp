#include "exl3/format.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/half.h"

namespace glm53::exl3 {
namespace {

constexpr uint32_t k3instMultiplier = 89226354u;
constexpr uint32_t k3instAddend = 64248484u;
constexpr uint32_t kMcgMultiplier = 0xCBAC1FEDu;
constexpr float kMul1Bias = -10.3828125f;  // fp16 0xc931

void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

// 3INST and MCG: two fp16 numbers made of the product's bits, added with one rounding (their sum is exact in fp32).
uint16_t sum_of_halves(uint32_t x) {
    x = (x & 0x8fff8fffu) ^ 0x3b603b60u;
    return float_to_half(half_to_float(static_cast<uint16_t>(x)) + half_to_float(static_cast<uint16_t>(x >> 16)));
}

}  // namespace

Codebook codebook_from_name(std::string_view name) {
    if (name == "3inst") return Codebook::k3inst;
    if (name == "mcg") return Codebook::kMcg;
    if (name == "mul1") return Codebook::kMul1;
    throw std::invalid_argument("unknown EXL3 codebook '" + std::string(name) + "': expected 3inst, mcg or mul1");
}

Rate Rate::from_words(int64_t words) {
    const bool whole = words % 16 == 0 && words >= 16 && words <= 128;
    const bool half = words == 24 || words == 40 || words == 56;
    require(whole || half, "an EXL3 tile of " + std::to_string(words) +
                               " words is none of the known rates (16 K words with K = 1..8, 1.5, 2.5 or 3.5)");
    return Rate(static_cast<int>(words / 8));
}

uint16_t codebook_value(uint16_t state, Codebook codebook) {
    switch (codebook) {
        case Codebook::k3inst:
            return sum_of_halves(state * k3instMultiplier + k3instAddend);
        case Codebook::kMcg:
            return sum_of_halves(state * kMcgMultiplier);
        case Codebook::kMul1:
            break;
    }
    // An fp16 fused multiply-add of 1024 + sum. Product and sum are multiples of 2^-18 below 16: exact in fp32.
    const float product = static_cast<float>(1024 + mul1_byte_sum(state)) * kMul1Step;
    return float_to_half(product + kMul1Bias);
}

void decode_tile(const void* tile, Rate rate, uint16_t states[kTileWeights]) {
    uint32_t words[65];
    const int n_words = rate.tile_bytes() / 4;
    std::memcpy(words, tile, static_cast<size_t>(rate.tile_bytes()));
    words[n_words] = words[0];  // the word after the last, on a ring
    const int ring = rate.ring_bits();
    for (int t = 0; t < kTileWeights; ++t) {
        const int begin = (rate.end_of(t) - 16 + ring) % ring;
        const uint64_t pair = static_cast<uint64_t>(words[begin / 32]) << 32 | words[begin / 32 + 1];
        states[t] = static_cast<uint16_t>(pair >> (48 - begin % 32));
    }
}

void decode_states(std::span<const uint16_t> trellis, Rate rate, std::span<uint16_t> states) {
    const size_t words = static_cast<size_t>(rate.tile_words());
    require(trellis.size() % words == 0 && trellis.size() / words * kTileWeights == states.size(),
            "EXL3 trellis of " + std::to_string(trellis.size()) + " words does not make " +
                std::to_string(states.size()) + " states");
    for (size_t tile = 0; tile < trellis.size() / words; ++tile) {
        decode_tile(trellis.data() + tile * words, rate, states.data() + tile * kTileWeights);
    }
}

void decode_inner_weight(std::span<const uint16_t> trellis, int64_t k_tiles, int64_t n_tiles, Rate rate,
                         Codebook codebook, std::span<uint16_t> weight) {
    require(rate.whole() || codebook == Codebook::kMul1, "EXL3 half rates exist with the mul1 codebook only");
    const size_t words = static_cast<size_t>(rate.tile_words());
    const size_t tiles = static_cast<size_t>(k_tiles * n_tiles);
    require(trellis.size() == tiles * words && weight.size() == tiles * kTileWeights,
            "EXL3 trellis of " + std::to_string(trellis.size()) + " words is not " + std::to_string(k_tiles) + " x " +
                std::to_string(n_tiles) + " tiles of " + std::to_string(words));
    std::vector<uint16_t> values(65536);
    for (uint32_t state = 0; state < values.size(); ++state) {
        values[state] = codebook_value(static_cast<uint16_t>(state), codebook);
    }
    uint16_t states[kTileWeights];
    for (int64_t tile = 0; tile < k_tiles * n_tiles; ++tile) {
        decode_tile(trellis.data() + static_cast<size_t>(tile) * words, rate, states);
        uint16_t* corner = weight.data() + (tile / n_tiles * n_tiles * kTileSide + tile % n_tiles) * kTileSide;
        for (int t = 0; t < kTileWeights; ++t) {
            corner[row_of(t) * n_tiles * kTileSide + column_of(t)] = values[states[t]];
        }
    }
}

void expand_signs(std::span<const uint16_t> words, std::span<uint16_t> values) {
    require(values.size() == words.size() * 16, "EXL3 sign words: " + std::to_string(words.size()) +
                                                    " words do not make " + std::to_string(values.size()) + " signs");
    for (size_t i = 0; i < values.size(); ++i) values[i] = words[i / 16] >> (i % 16) & 1 ? 0xbc00 : 0x3c00;
}

}  // namespace glm53::exl3
