// The EXL3 reference decoder against the format written out bit by bit, and known values of its codebooks.
#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "common/half.h"
#include "exl3/format.h"

using namespace glm53;
using exl3::Codebook;
using exl3::Rate;

namespace {

std::vector<uint16_t> random_words(size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<uint16_t> words(count);
    for (uint16_t& w : words) w = static_cast<uint16_t>(random());
    return words;
}

// Bit s of the ring: the 16-bit words swapped in pairs, each most significant bit first.
int ring_bit(const std::vector<uint16_t>& words, int s) {
    const int word = (s / 16) ^ 1;
    return words[static_cast<size_t>(word)] >> (15 - s % 16) & 1;
}

}  // namespace

TEST_CASE("states are the 16 ring bits that end with a position's own") {
    for (const int words : {16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128}) {
        CAPTURE(words);
        const Rate rate = Rate::from_words(words);
        const auto tile = random_words(static_cast<size_t>(words), 1);
        uint16_t states[exl3::kTileWeights];
        exl3::decode_tile(tile.data(), rate, states);
        const int ring = words * 16;
        int end = 0;
        for (int t = 0; t < exl3::kTileWeights; ++t) {
            end += words / 16 + (words % 16 != 0 && t % 2 == 1 ? 1 : 0);
            int expected = 0;
            for (int b = 0; b < 16; ++b) expected = expected * 2 + ring_bit(tile, (end - 16 + b + ring) % ring);
            REQUIRE(states[t] == expected);
        }
        CHECK(end == ring);
    }
}

TEST_CASE("ring positions cover the tile once") {
    std::set<int> places;
    for (int t = 0; t < exl3::kTileWeights; ++t) places.insert(exl3::row_of(t) * 16 + exl3::column_of(t));
    CHECK(places.size() == 256);
    CHECK(*places.begin() == 0);
    CHECK(*places.rbegin() == 255);
    CHECK(exl3::row_of(3) == 9);      // lane 0, j = 3
    CHECK(exl3::column_of(36) == 9);  // lane 4, j = 4
}

TEST_CASE("codebook statistics") {
    struct Case {
        Codebook codebook;
        double deviation;
        double largest;
    };
    for (const Case c : {Case{Codebook::k3inst, 1.2437, 3.97}, Case{Codebook::kMcg, 1.2441, 3.97},
                         Case{Codebook::kMul1, 1.0003, 3.453}}) {
        double squares = 0;
        double largest = 0;
        for (int s = 0; s < 65536; ++s) {
            const double v = half_to_float(exl3::codebook_value(static_cast<uint16_t>(s), c.codebook));
            squares += v * v;
            largest = std::max(largest, std::fabs(v));
        }
        CHECK(std::sqrt(squares / 65536) == doctest::Approx(c.deviation).epsilon(1e-3));
        CHECK(largest == doctest::Approx(c.largest).epsilon(1e-2));
    }
    CHECK(exl3::codebook_value(0, Codebook::kMul1) == float_to_half(1024 * exl3::kMul1Step - 10.3828125f));
    CHECK(exl3::codebook_value(0, Codebook::kMcg) == float_to_half(2 * half_to_float(0x3b60)));
}

TEST_CASE("inner weight places tiles in rows and columns") {
    const auto trellis = random_words(size_t{2} * 3 * 48, 2);
    const Rate rate = Rate::from_words(48);
    std::vector<uint16_t> weight(size_t{2} * 3 * 256);
    exl3::decode_inner_weight(trellis, 2, 3, rate, Codebook::kMul1, weight);
    std::vector<uint16_t> states(weight.size());
    exl3::decode_states(trellis, rate, states);
    for (size_t tile = 0; tile < 6; ++tile) {
        for (int t = 0; t < 256; ++t) {
            const size_t row = tile / 3 * 16 + static_cast<size_t>(exl3::row_of(t));
            const size_t column = tile % 3 * 16 + static_cast<size_t>(exl3::column_of(t));
            const uint16_t state = states[tile * 256 + static_cast<size_t>(t)];
            REQUIRE(weight[row * 48 + column] == exl3::codebook_value(state, Codebook::kMul1));
        }
    }
}

TEST_CASE("refusals") {
    for (const int words : {0, 8, 72, 144, 47}) CHECK_THROWS_AS(Rate::from_words(words), std::invalid_argument);
    CHECK_THROWS_AS(exl3::codebook_from_name("mul2"), std::invalid_argument);
    std::vector<uint16_t> weight(256);
    const std::vector<uint16_t> half_rate(40);
    CHECK_THROWS_WITH_AS(exl3::decode_inner_weight(half_rate, 1, 1, Rate::from_words(40), Codebook::kMcg, weight),
                         doctest::Contains("mul1 codebook only"), std::invalid_argument);
    CHECK_THROWS_AS(exl3::decode_inner_weight(half_rate, 1, 2, Rate::from_words(40), Codebook::kMul1, weight),
                    std::invalid_argument);
}

TEST_CASE("sign words") {
    const std::vector<uint16_t> words = {0x0001, 0x8000};
    std::vector<uint16_t> values(32);
    exl3::expand_signs(words, values);
    for (size_t i = 0; i < 32; ++i) CHECK(half_to_float(values[i]) == (i == 0 || i == 31 ? -1.0f : 1.0f));
}

TEST_CASE("half precision round trip and rounding") {
    for (uint32_t h = 0; h < 65536; ++h) {
        const uint16_t bits = static_cast<uint16_t>(h);
        if ((h & 0x7c00u) == 0x7c00u && (h & 0x3ffu)) {
            CHECK(std::isnan(half_to_float(bits)));
        } else {
            REQUIRE(float_to_half(half_to_float(bits)) == bits);
        }
    }
    CHECK(float_to_half(1.0f + 0x1p-11f) == 0x3c00);      // tie to even, down
    CHECK(float_to_half(1.0f + 3 * 0x1p-11f) == 0x3c02);  // tie to even, up
    CHECK(float_to_half(1.0f + 0x1p-11f + 0x1p-20f) == 0x3c01);
    CHECK(float_to_half(65519.0f) == 0x7bff);
    CHECK(float_to_half(65520.0f) == 0x7c00);
    CHECK(float_to_half(0x1p-25f) == 0);  // half of the smallest, tie to even
    CHECK(float_to_half(0x1.8p-25f) == 1);
    CHECK(float_to_half(std::nanf("")) == 0x7e00);
}
