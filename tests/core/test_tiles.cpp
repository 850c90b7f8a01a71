// One-row products on a tile unit, on a model of the unit, against those in 16-bit lanes. On a processor that has the
// unit, test_kernels.cpp runs them on it.
#include <doctest/doctest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/dispatch.h"
#include "exl3/constants.h"
#include "guarded_memory.h"
#include "tile_model.h"

using namespace glm53;

namespace {

constexpr int kInputs = 512;  // four blocks
constexpr int kTiles = 37;    // tile columns: two groups and a part

// Blocks of every kind: small values, one that only fits negated, one that only fits as it is, one that does not fit.
struct Prepared {
    int16_t values[kInputs];
    int32_t bias[4];
    float scale[4];

    Prepared() {
        uint32_t random = 1;
        for (int i = 0; i < kInputs; ++i) {
            random = random * 1664525 + 1013904223;
            values[i] = static_cast<int16_t>(static_cast<int>(random >> 16) % 32640 * (i % 3 ? 1 : -1));
        }
        values[128 + 17] = 32767;
        values[256 + 99] = -32767;
        values[384 + 3] = 32640, values[384 + 4] = -32640;
        for (int b = 0; b < 4; ++b) {
            bias[b] = 0;
            for (int i = 0; i < 128; ++i) bias[b] -= exl3::kMul1Centre * values[128 * b + i];
            scale[b] = 0.5f + static_cast<float>(b);
        }
    }
    cpu::Activations view() { return {values, bias, scale, kInputs, true}; }
};

bool avx512_here() {
    const auto names = cpu::available_isas();
    return std::find(names.begin(), names.end(), "avx512w") != names.end();
}

}  // namespace

TEST_CASE("one row on a tile unit equals the 16-bit lanes, and reads nothing outside the trellis") {
    if (!avx512_here()) return;
    Prepared x;
    for (int bits = 2; bits <= 4; ++bits) {
        const size_t bytes = static_cast<size_t>(kInputs / 16 * kTiles * 32 * bits);
        for (const auto flush : {test::GuardedMemory::Flush::kStart, test::GuardedMemory::Flush::kEnd}) {
            const test::GuardedMemory trellis(bytes, flush);
            for (size_t i = 0; i < bytes; ++i) trellis.data()[i] = static_cast<uint8_t>(i * i * 31 >> 4);
            for (const auto& [begin, end] : {std::pair{0, kTiles}, {3, 19}, {5, 8}, {0, 32}}) {
                std::vector<float> expected(kTiles * 16, 1.5f), actual = expected;
                cpu::Gemv gemv{trellis.data(), kTiles,          begin,      end, 0, kInputs / 128, 1,
                               x.view(),       expected.data(), kTiles * 16};
                cpu::kAvx512WordKernels.gemv[bits - cpu::kMinBits](&gemv);
                gemv.y = actual.data();
                test::kModelTileKernels.gemv[bits - cpu::kMinBits](&gemv);
                CHECK(actual == expected);
                CHECK(test::model_tiles_released());
            }
        }
    }
}

TEST_CASE("activations that have no two signed bytes are negated, or refused") {
    if (!avx512_here()) return;
    const Prepared x;
    CHECK(test::sign_on_tiles(x.values) == 1);
    CHECK(test::sign_on_tiles(x.values + 128) == -1);
    CHECK(test::sign_on_tiles(x.values + 256) == 1);
    CHECK(test::sign_on_tiles(x.values + 384) == 0);
}
