// Every vector kernel against the scalar one, and the scalar one against float64 arithmetic on the decoded states.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/half.h"
#include "cpu/dispatch.h"
#include "cpu/kernel_race.h"
#include "exl3/format.h"
#include "guarded_memory.h"

using namespace glm53;
using cpu::Activations;
using cpu::Gemv;
using cpu::Kernels;
using test::GuardedMemory;

namespace {

constexpr int kInputs = 384;  // three blocks
constexpr int kTiles = 11;    // tile columns: no power of two
constexpr int kOutputs = kTiles * 16;

// Integer activations of +-15 and signs for suh: their rotation is exact in fp32 in any order, so every table must
// round to the same int16 values.
struct Input {
    std::vector<float> x;
    std::vector<uint16_t> suh;

    explicit Input(int rows, bool integers = true) : x(static_cast<size_t>(rows * kInputs)), suh(kInputs) {
        std::mt19937 random(7);
        std::uniform_int_distribution<int> value(-15, 15);
        std::normal_distribution<float> normal;
        for (float& v : x) v = integers ? static_cast<float>(value(random)) : normal(random);
        for (uint16_t& s : suh) s = random() & 1 ? 0x3c00 : 0xbc00;
    }
};

struct Prepared {
    std::vector<int16_t> values;
    std::vector<int32_t> bias;
    std::vector<float> scale;
    std::vector<float> offset;
    Activations view;

    Prepared(const Kernels& kernels, const Input& input, int rows)
        : values(static_cast<size_t>(rows * kInputs * kernels.words_per_value)),
          bias(static_cast<size_t>(rows * kInputs / cpu::kBlock)),
          scale(static_cast<size_t>(rows * kInputs / cpu::kBlock)),
          offset(static_cast<size_t>(rows)) {
        view = {values.data(), bias.data(), scale.data(), kInputs, rows == 1};
        for (int r = 0; r < rows; ++r) {
            for (int b = 0; b < kInputs / cpu::kBlock; ++b) {
                offset[static_cast<size_t>(r)] += kernels.quantise(input.x.data() + r * kInputs + b * cpu::kBlock,
                                                                   input.suh.data() + b * cpu::kBlock, &view, r, b);
            }
        }
    }
};

void fill_random(uint8_t* bytes, size_t count, unsigned seed) {
    std::mt19937 random(seed);
    for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(random());
}

std::vector<float> multiply(const Kernels& kernels, const uint8_t* trellis, int bits, int rows, const Activations& x,
                            int n_begin = 0, int n_end = kTiles, int block_begin = 0, int block_end = 3) {
    std::vector<float> y(static_cast<size_t>(rows * kOutputs), 1.5f);
    const Gemv gemv{trellis, kTiles, n_begin, n_end, block_begin, block_end, rows, x, y.data(), kOutputs};
    kernels.gemv[bits - cpu::kMinBits](&gemv);
    return y;
}

double relative_rms(const std::vector<float>& actual, const std::vector<double>& expected) {
    double error = 0;
    double power = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
        error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
        power += expected[i] * expected[i];
    }
    return std::sqrt(error / power);
}

std::vector<double> as_double(const std::vector<float>& values) {
    return {values.begin(), values.end()};
}

std::vector<const Kernels*> vector_tables() {
    std::vector<const Kernels*> tables;
    for (const std::string& name : cpu::available_isas()) {
        if (name != "scalar") tables.push_back(&cpu::select_kernels(name));
    }
    return tables;
}

void hadamard(std::vector<double>& v) {
    for (size_t width = 1; width < v.size(); width *= 2) {
        for (size_t i = 0; i < v.size(); ++i) {
            if (i & width) continue;
            const double a = v[i];
            v[i] = a + v[i + width];
            v[i + width] = a - v[i + width];
        }
    }
    for (double& value : v) value *= exl3::kHadamardScale;
}

}  // namespace

TEST_CASE("scalar kernel and offset: the decoded fp16 weights in float64") {
    for (int bits = 2; bits <= 4; ++bits) {
        const Input input(1, false);
        const Kernels& kernels = cpu::select_kernels("scalar");
        const Prepared prepared(kernels, input, 1);
        const size_t bytes = static_cast<size_t>(kInputs / 16 * kTiles * 32 * bits);
        std::vector<uint16_t> trellis(bytes / 2);
        fill_random(reinterpret_cast<uint8_t*>(trellis.data()), bytes, 3);
        std::vector<uint16_t> weight(static_cast<size_t>(kInputs * kOutputs));
        exl3::decode_inner_weight(trellis, kInputs / 16, kTiles, exl3::Rate::from_words(16 * bits),
                                  exl3::Codebook::kMul1, weight);
        std::vector<double> expected(kOutputs, 1.5);
        for (int b = 0; b < kInputs; b += 128) {
            std::vector<double> x(128);
            for (int i = 0; i < 128; ++i) {
                x[static_cast<size_t>(i)] =
                    input.x[static_cast<size_t>(b + i)] * half_to_float(input.suh[static_cast<size_t>(b + i)]);
            }
            hadamard(x);
            for (int i = 0; i < 128; ++i) {
                for (int n = 0; n < kOutputs; ++n) {
                    expected[static_cast<size_t>(n)] +=
                        x[static_cast<size_t>(i)] * half_to_float(weight[static_cast<size_t>((b + i) * kOutputs + n)]);
                }
            }
        }
        std::vector<float> y = multiply(kernels, reinterpret_cast<uint8_t*>(trellis.data()), bits, 1, prepared.view);
        for (float& value : y) value += prepared.offset[0];
        CHECK(relative_rms(y, expected) < 3e-4);  // the fp16 rounding of the codebook: 2.1e-4
    }
}

TEST_CASE("the mul1 offset is the mean of what the affine form leaves out") {
    double sum = 0;
    for (int s = 0; s < 65536; ++s) {
        const uint16_t state = static_cast<uint16_t>(s);
        const double affine = (exl3::mul1_byte_sum(state) - exl3::kMul1Centre) * double{exl3::kMul1Step};
        sum += half_to_float(exl3::codebook_value(state, exl3::Codebook::kMul1)) - affine;
    }
    CHECK(sum / 65536 == doctest::Approx(exl3::kMul1Offset).epsilon(1e-3));
}

TEST_CASE("vector kernels equal the scalar kernel, and read nothing outside the trellis") {
    for (const Kernels* kernels : vector_tables()) {
        for (int bits = 2; bits <= 4; ++bits) {
            const size_t bytes = static_cast<size_t>(kInputs / 16 * kTiles * 32 * bits);
            using Flush = GuardedMemory::Flush;
            for (const auto& [flush, shift] : {std::pair{Flush::kStart, 0}, {Flush::kEnd, 0}, {Flush::kStart, 1}}) {
                const GuardedMemory memory(bytes + static_cast<size_t>(shift), flush);
                uint8_t* trellis = memory.data() + shift;  // an odd address the third time
                fill_random(trellis, bytes, 5);
                for (int rows = 1; rows <= cpu::kMaxRows; ++rows) {
                    CAPTURE(kernels->name);
                    CAPTURE(bits);
                    CAPTURE(rows);
                    const Input input(rows);
                    const Prepared scalar(cpu::kScalarKernels, input, rows);
                    const Prepared vector(*kernels, input, rows);
                    CHECK(scalar.bias == vector.bias);
                    CHECK(scalar.scale == vector.scale);
                    const auto expected = multiply(cpu::kScalarKernels, trellis, bits, rows, scalar.view);
                    const auto actual = multiply(*kernels, trellis, bits, rows, vector.view);
                    CHECK(actual == expected);  // exact integer sums, then the same fused multiply-adds
                }
            }
        }
    }
}

TEST_CASE("the AVX-512 tables give the same bits on any activations") {
    const auto names = cpu::available_isas();
    if (std::find(names.begin(), names.end(), "avx512w") == names.end()) return;
    for (int bits = 2; bits <= 4; ++bits) {
        std::vector<uint8_t> trellis(static_cast<size_t>(kInputs / 16 * kTiles * 32 * bits));
        fill_random(trellis.data(), trellis.size(), 11);
        for (int rows = 1; rows <= cpu::kMaxRows; ++rows) {
            const Input input(rows, false);
            std::vector<std::vector<float>> results;
            for (const char* name : {"avx512", "avx512w"}) {
                const Kernels& kernels = cpu::select_kernels(name);
                const Prepared prepared(kernels, input, rows);
                results.push_back(multiply(kernels, trellis.data(), bits, rows, prepared.view));
                results.push_back(prepared.offset);
            }
            CHECK(results[0] == results[2]);
            CHECK(results[1] == results[3]);
        }
    }
}

TEST_CASE("parts of a matrix: only the asked columns change, blocks add up") {
    const Input input(2);
    const size_t bytes = static_cast<size_t>(kInputs / 16 * kTiles * 32 * 3);
    const GuardedMemory trellis(bytes, GuardedMemory::Flush::kEnd);
    fill_random(trellis.data(), bytes, 9);
    for (const std::string& name : cpu::available_isas()) {
        const Kernels& kernels = cpu::select_kernels(name);
        const Prepared prepared(kernels, input, 2);
        const auto whole = multiply(kernels, trellis.data(), 3, 2, prepared.view);
        const auto columns = multiply(kernels, trellis.data(), 3, 2, prepared.view, 3, 5);
        for (int r = 0; r < 2; ++r) {
            for (int n = 0; n < kOutputs; ++n) {
                const size_t i = static_cast<size_t>(r * kOutputs + n);
                CHECK(columns[i] == (n >= 48 && n < 80 ? whole[i] : 1.5f));
            }
        }
        const auto first = multiply(kernels, trellis.data(), 3, 2, prepared.view, 0, kTiles, 0, 1);
        const auto rest = multiply(kernels, trellis.data(), 3, 2, prepared.view, 0, kTiles, 1, 3);
        std::vector<double> sum(whole.size());
        for (size_t i = 0; i < sum.size(); ++i) sum[i] = double{first[i]} + rest[i] - 1.5;
        CHECK(relative_rms(whole, sum) < 3e-7);
    }
}

TEST_CASE("extreme activations: every int32 sum stays exact") {
    // Equal values rotate to one large value; with all-ones signs it lands on 32767 and the sums meet their bounds.
    for (const std::string& name : cpu::available_isas()) {
        const Kernels& kernels = cpu::select_kernels(name);
        Input input(1);
        std::fill(input.suh.begin(), input.suh.end(), uint16_t{0x3c00});
        std::fill(input.x.begin(), input.x.end(), 0.0f);
        for (int b = 0; b < kInputs; b += 128) input.x[static_cast<size_t>(b)] = -3.0f;  // rotates to 128 times -3
        const Prepared prepared(kernels, input, 1);
        for (const uint8_t byte : {uint8_t{0}, uint8_t{255}}) {
            const std::vector<uint8_t> trellis(static_cast<size_t>(kInputs / 16 * kTiles * 96), byte);
            const int sum = exl3::mul1_byte_sum(static_cast<uint16_t>(byte * 257));
            const double expected = 1.5 - 3.0 * kInputs * double{exl3::kHadamardScale} * (sum - 510) * exl3::kMul1Step;
            for (const float y : multiply(kernels, trellis.data(), 3, 1, prepared.view)) {
                CHECK(y == doctest::Approx(expected).epsilon(1e-5));
            }
        }
    }
}

TEST_CASE("rotate_out") {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> input(128);
    std::vector<uint16_t> svh(128);
    for (float& v : input) v = normal(random);
    for (uint16_t& s : svh) s = float_to_half(normal(random));
    std::vector<double> expected(input.begin(), input.end());
    for (double& v : expected) v += 0.25;
    hadamard(expected);
    for (size_t i = 0; i < 128; ++i) expected[i] *= half_to_float(svh[i]);
    for (const std::string& name : cpu::available_isas()) {
        std::vector<float> y = input;
        cpu::select_kernels(name).rotate_out(y.data(), 0.25f, svh.data());
        CHECK(relative_rms(y, expected) < 1e-6);
    }
}

TEST_CASE("swiglu: the gate is clamped after silu, up on both sides, NaN survives") {
    for (const std::string& name : cpu::available_isas()) {
        CAPTURE(name);
        for (const float limit : {0.0f, 2.0f, 10.0f}) {
            for (int step = 0; step < 4; ++step) {
                std::vector<float> gate(128);
                std::vector<float> up(128);
                for (int i = 0; i < 128; ++i) {
                    gate[static_cast<size_t>(i)] = static_cast<float>(i - 64 + step * 0.25) * (step == 3 ? 3.0f : 0.3f);
                    up[static_cast<size_t>(i)] = static_cast<float>((i * 37 % 128) - 64) * 0.4f;
                }
                std::vector<float> actual = gate;
                cpu::select_kernels(name).swiglu(actual.data(), up.data(), limit);
                for (size_t i = 0; i < 128; ++i) {
                    double g = gate[i] / (1 + std::exp(-double{gate[i]}));
                    double u = up[i];
                    if (limit > 0) {
                        g = std::min(g, double{limit});
                        u = std::clamp(u, -double{limit}, double{limit});
                    }
                    CHECK(std::fabs(actual[i] - g * u) <= 4e-7 * std::fabs(g * u) + 1e-30);
                }
            }
        }
        std::vector<float> gate(128, 1.0f);
        std::vector<float> up(128, 1.0f);
        gate[3] = up[9] = std::nanf("");
        cpu::select_kernels(name).swiglu(gate.data(), up.data(), 10.0f);
        for (size_t i = 0; i < 128; ++i) CHECK(std::isnan(gate[i]) == (i == 3 || i == 9));
    }
}

TEST_CASE("the fastest table is found, wherever it stands, but for one with other results") {
    if (vector_tables().empty()) return;
    static int calls;
    static const Kernels& fast = *vector_tables().front();
    Kernels slow = fast;
    slow.gemv[3 - cpu::kMinBits] = [](const Gemv* gemv) {
        ++calls;
        std::vector<float> elsewhere(static_cast<size_t>(gemv->y_stride));
        Gemv again = *gemv;
        again.y = elsewhere.data();
        for (int i = 0; i < 9; ++i) fast.gemv[3 - cpu::kMinBits](&again);
        fast.gemv[3 - cpu::kMinBits](gemv);
    };
    Kernels slower = slow;
    const auto fastest = [](std::initializer_list<const Kernels*> tables) {
        return &cpu::fastest_kernels(std::span(tables.begin(), tables.size()));
    };
    CHECK(fastest({&fast, &slow}) == &fast);
    CHECK(fastest({&slow, &fast}) == &fast);
    CHECK(fastest({&slow, &slower, &fast}) == &fast);
    CHECK(fastest({&slow}) == &slow);
    CHECK(calls > 0);
    Kernels wrong = fast;  // the fastest of all, for it does nothing
    wrong.gemv[3 - cpu::kMinBits] = [](const Gemv*) {};
    CHECK(fastest({&slow, &wrong}) == &slow);
}

TEST_CASE("choosing kernels") {
    CHECK(cpu::available_isas().back() == "scalar");
    CHECK(cpu::select_kernels("auto").name == cpu::available_isas().front());
    CHECK_THROWS_WITH_AS(cpu::select_kernels("neon"), doctest::Contains("no CPU kernels 'neon'"),
                         std::invalid_argument);
}
