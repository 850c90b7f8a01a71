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
constexpr int kTiles = 37;    // tile columns: pairs and a single one

// Blocks of every kind: small values, one that is negated, one that need not be, one that needs a third digit; each in
// the order of the unit's values (natural) and in that of the 16-bit lanes.
struct Prepared {
    int16_t values[kInputs], words[kInputs];
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
        for (int i = 0; i < kInputs; ++i) {  // 0, 1, 8, 9, 2, 3, 10, 11, ... of each 16
            const int at = i % 16;
            words[i] = values[i - at + at / 4 * 2 + at % 2 + (at % 4 < 2 ? 0 : 8)];
        }
    }
    cpu::Activations view(int16_t* order) { return {order, bias, scale, kInputs, true}; }
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
            for (const auto& [begin, end] :
                 {std::pair{0, kTiles}, {3, 19}, {5, 8}, {0, 32}, {7, 8}, {36, 37}, {2, 4}, {4, 4}}) {
                std::vector<float> expected(kTiles * 16, 1.5f), actual = expected;
                cpu::Gemv gemv{trellis.data(),  kTiles,          begin,      end, 0, kInputs / 128, 1,
                               x.view(x.words), expected.data(), kTiles * 16};
                cpu::kAvx512WordKernels.gemv[bits - cpu::kMinBits](&gemv);
                gemv.x = x.view(x.values);
                gemv.y = actual.data();
                test::kModelTileKernels.gemv[bits - cpu::kMinBits](&gemv);
                CHECK(actual == expected);
                CHECK(test::model_tiles_released());
            }
        }
    }
}

TEST_CASE("activations that have no two signed bytes are negated, or get a third digit") {
    if (!avx512_here()) return;
    const Prepared x;
    const auto is = [&](int block, bool negated, bool extra) {
        const test::BlockDigits digits = test::digits_on_tiles(x.values + 128 * block);
        return digits.negated == negated && digits.extra == extra;
    };
    CHECK(is(0, false, false));
    CHECK(is(1, true, false));
    CHECK(is(2, false, false));
    CHECK(is(3, true, true));
}

TEST_CASE("the table with the unit rounds one row into the order that the unit takes, more rows for the 16-bit lanes") {
    if (!avx512_here()) return;
    std::vector<float> x(128);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 37 % 101) - 50.0f;
    const std::vector<uint16_t> ones(128, 0x3c00);
    std::vector<uint8_t> trellis(8 * 4 * 96);
    for (size_t i = 0; i < trellis.size(); ++i) trellis[i] = static_cast<uint8_t>(i * i * 31 >> 4);
    for (const bool one_row : {true, false}) {
        std::vector<float> y[2];
        int16_t values[2][128];
        for (const cpu::Kernels* table : {&cpu::kAvx512WordKernels, &cpu::kAmxKernels}) {
            const int i = table == &cpu::kAmxKernels;
            int32_t bias;
            float scale;
            cpu::Activations out{values[i], &bias, &scale, 128, one_row};
            table->quantise(x.data(), ones.data(), &out, 0, 0);
            const cpu::Kernels& product = i && one_row ? test::kModelTileKernels : cpu::kAvx512WordKernels;
            y[i].assign(64, 0.0f);
            const cpu::Gemv gemv{trellis.data(), 4, 0, 4, 0, 1, 1, out, y[i].data(), 64};
            product.gemv[1](&gemv);
        }
        CHECK(y[0] == y[1]);
        CHECK(std::equal(values[0], values[0] + 128, values[1]) == !one_row);
    }
}
