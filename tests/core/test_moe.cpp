// CpuMoe against the same experts computed in float64 from the decoded weights; small enough for the sanitizers.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/half.h"
#include "cpu/dispatch.h"
#include "cpu/moe.h"
#include "exl3/format.h"
#include "guarded_memory.h"

using namespace glm53;
using cpu::CpuMoe;
using cpu::ExpertTable;
using cpu::Part;
using test::GuardedMemory;

namespace {

constexpr int kHidden = 256;
constexpr int kInter = 384;
constexpr float kLimit = 2.0f;
using Matrix = std::vector<double>;  // (k, n)

struct Linear {
    int k, n, bits;
    std::unique_ptr<GuardedMemory> trellis, suh, svh;
    Matrix weight;

    Linear(int inputs, int outputs, int rate, float size, std::mt19937& random) : k(inputs), n(outputs), bits(rate) {
        const auto allocate = [](size_t bytes) {
            return std::make_unique<GuardedMemory>(bytes, GuardedMemory::Flush::kEnd);
        };
        trellis = allocate(trellis_bytes());
        for (size_t i = 0; i < trellis_bytes(); ++i) trellis->data()[i] = static_cast<uint8_t>(random());
        suh = allocate(static_cast<size_t>(k) * 2);
        svh = allocate(static_cast<size_t>(n) * 2);
        fill_scales(suh->data(), k, size, random);
        fill_scales(svh->data(), n, 1.0f, random);
        decode();
    }
    size_t trellis_bytes() const { return static_cast<size_t>(k * n * bits / 8); }

    void put(ExpertTable& table, int expert, Part part) const {
        const auto bytes = [](const GuardedMemory& memory, size_t count) {
            return std::span(reinterpret_cast<const std::byte*>(memory.data()), count);
        };
        table.set(expert, part, bytes(*trellis, trellis_bytes()), bytes(*suh, static_cast<size_t>(k) * 2),
                  bytes(*svh, static_cast<size_t>(n) * 2), bits);
    }

    std::vector<double> multiply(std::vector<double> x) const {
        const auto* in = reinterpret_cast<const uint16_t*>(suh->data());
        const auto* out = reinterpret_cast<const uint16_t*>(svh->data());
        for (int i = 0; i < k; ++i) x[static_cast<size_t>(i)] *= half_to_float(in[i]);
        hadamard(x);
        std::vector<double> y(static_cast<size_t>(n));
        for (int i = 0; i < k; ++i) {
            for (int j = 0; j < n; ++j) {
                y[static_cast<size_t>(j)] += x[static_cast<size_t>(i)] * weight[static_cast<size_t>(i * n + j)];
            }
        }
        hadamard(y);
        for (int j = 0; j < n; ++j) y[static_cast<size_t>(j)] *= half_to_float(out[j]);
        return y;
    }

  private:
    static void fill_scales(uint8_t* bytes, int count, float size, std::mt19937& random) {
        std::uniform_real_distribution<float> jitter(0.8f, 1.2f);
        for (int i = 0; i < count; ++i) {
            const uint16_t value = float_to_half((random() & 1 ? size : -size) * jitter(random));
            std::memcpy(bytes + 2 * i, &value, 2);
        }
    }
    static void hadamard(std::vector<double>& v) {
        for (size_t base = 0; base < v.size(); base += 128) {
            for (size_t width = 1; width < 128; width *= 2) {
                for (size_t i = base; i < base + 128; ++i) {
                    if ((i - base) & width) continue;
                    const double a = v[i];
                    v[i] = a + v[i + width];
                    v[i + width] = a - v[i + width];
                }
            }
        }
        for (double& value : v) value *= exl3::kHadamardScale;
    }
    void decode() {
        std::vector<uint16_t> words(trellis_bytes() / 2);
        std::memcpy(words.data(), trellis->data(), trellis_bytes());
        std::vector<uint16_t> halves(static_cast<size_t>(k * n));
        exl3::decode_inner_weight(words, k / 16, n / 16, exl3::Rate::from_words(16 * bits), exl3::Codebook::kMul1,
                                  halves);
        for (const uint16_t h : halves) weight.push_back(half_to_float(h));
    }
};

struct Layer {
    std::vector<Linear> gate, up, down;
    ExpertTable table;

    Layer(int experts, int bits) : table(experts, kHidden, kInter, kLimit) {
        std::mt19937 random(static_cast<unsigned>(bits));
        for (int e = 0; e < experts; ++e) {
            gate.emplace_back(kHidden, kInter, bits, 2.0f / 16, random);
            up.emplace_back(kHidden, kInter, bits, 2.0f / 16, random);
            down.emplace_back(kInter, kHidden, bits, 1.0f / 20, random);
            gate.back().put(table, e, Part::kGate);
            up.back().put(table, e, Part::kUp);
            down.back().put(table, e, Part::kDown);
        }
    }

    // How often each of the three clamps acts is counted in `clamped`: gate, up high, up low.
    std::vector<double> expert(int e, const float* x, int* clamped) const {
        const std::vector<double> input(x, x + kHidden);
        std::vector<double> g = gate[static_cast<size_t>(e)].multiply(input);
        const std::vector<double> u = up[static_cast<size_t>(e)].multiply(input);
        for (size_t i = 0; i < g.size(); ++i) {
            const double silu = g[i] / (1 + std::exp(-g[i]));
            clamped[0] += silu > kLimit;
            clamped[1] += u[i] > kLimit;
            clamped[2] += u[i] < -kLimit;
            g[i] = std::min(silu, double{kLimit}) * std::clamp(u[i], -double{kLimit}, double{kLimit});
        }
        return down[static_cast<size_t>(e)].multiply(g);
    }
};

struct Call {
    int rows, top_k;
    std::vector<float> x, weights, out;
    std::vector<int64_t> picks;

    Call(int r, int k, int experts, unsigned seed = 1)
        : rows(r),
          top_k(k),
          x(static_cast<size_t>(r * kHidden)),
          weights(static_cast<size_t>(r * k)),
          out(x.size(), std::numeric_limits<float>::quiet_NaN()),
          picks(static_cast<size_t>(r * k)) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (float& v : x) v = normal(random);
        for (float& w : weights) w = 0.2f + static_cast<float>(random() % 100) / 100;
        for (int64_t& p : picks) p = static_cast<int64_t>(random() % static_cast<unsigned>(experts));
    }
    void run(CpuMoe& moe, const ExpertTable& table) {
        moe.forward(table, {x.data(), picks.data(), weights.data(), out.data(), rows, top_k});
    }
    double error(const Layer& layer, int* clamped) const {
        double error = 0;
        double power = 0;
        for (int r = 0; r < rows; ++r) {
            std::vector<double> expected(kHidden);
            for (int i = r * top_k; i < (r + 1) * top_k; ++i) {
                const auto y =
                    layer.expert(static_cast<int>(picks[static_cast<size_t>(i)]), x.data() + r * kHidden, clamped);
                for (size_t c = 0; c < y.size(); ++c) expected[c] += y[c] * weights[static_cast<size_t>(i)];
            }
            for (int c = 0; c < kHidden; ++c) {
                const double e = expected[static_cast<size_t>(c)];
                error += std::pow(out[static_cast<size_t>(r * kHidden + c)] - e, 2);
                power += e * e;
            }
        }
        return std::sqrt(error / power);
    }
};

}  // namespace

TEST_CASE("each instruction set and rate, with the clamp at work, between guard pages") {
    for (int bits = 2; bits <= 4; ++bits) {
        const Layer layer(3, bits);
        for (const std::string& isa : cpu::available_isas()) {
            CAPTURE(isa);
            CAPTURE(bits);
            CpuMoe moe(2, {}, isa);
            CHECK(isa == moe.isa());
            for (const int rows : {1, 4, 8}) {
                Call call(rows, 2, 3);
                call.run(moe, layer.table);
                int clamped[3] = {};
                CHECK(call.error(layer, clamped) < 1e-3);  // few terms: a wider spread than a real expert's 3.8e-4
                for (const int count : clamped) CHECK(count > 3);
            }
        }
    }
}

TEST_CASE("same bits from run to run; other thread counts differ by rounding alone") {
    const Layer layer(4, 3);
    for (const int rows : {1, 3, 19}) {
        Call one(rows, 3, 4);
        CpuMoe single(1, {}, "auto");
        one.run(single, layer.table);
        for (const int threads : {2, 3, 7}) {
            CpuMoe moe(threads, {}, "auto");
            Call first(rows, 3, 4);
            Call second(rows, 3, 4);
            first.run(moe, layer.table);
            second.run(moe, layer.table);
            CHECK(first.out == second.out);
            double error = 0;
            double power = 0;
            for (size_t i = 0; i < one.out.size(); ++i) {
                error += std::pow(double{first.out[i]} - one.out[i], 2);
                power += std::pow(one.out[i], 2);
            }
            CHECK(std::sqrt(error / power) < 1e-6);
        }
    }
}

TEST_CASE("counters") {
    const Layer layer(3, 3);
    CpuMoe moe(2, {}, "auto");
    Call call(9, 1, 3);
    std::fill(call.picks.begin(), call.picks.end(), 1);
    call.run(moe, layer.table);
    const auto stats = moe.stats();
    CHECK(stats.calls == 1);
    CHECK(stats.rows == 9);
    CHECK(stats.picks == 9);
    CHECK(stats.expert_bytes == 2 * 3 * kHidden * kInter * 3 / 8);  // nine rows of one expert: decoded for 5 and for 4
    CHECK(stats.seconds > 0);
}

TEST_CASE("no picks, no rows") {
    const Layer layer(1, 3);
    CpuMoe moe(2, {}, "auto");
    Call nothing(2, 0, 1);
    nothing.run(moe, layer.table);
    CHECK(std::all_of(nothing.out.begin(), nothing.out.end(), [](float v) { return v == 0.0f; }));
    Call empty(0, 4, 1);
    empty.run(moe, layer.table);
}

TEST_CASE("bad picks are errors that leave the output alone") {
    const Layer layer(2, 3);
    CpuMoe moe(1, {}, "auto");
    for (const int64_t bad : {int64_t{-1}, int64_t{2}, std::numeric_limits<int64_t>::min()}) {
        Call call(2, 2, 2);
        call.picks[3] = bad;
        std::fill(call.out.begin(), call.out.end(), 7.0f);
        CHECK_THROWS_WITH_AS(call.run(moe, layer.table), doctest::Contains("row 1 picks expert"), std::out_of_range);
        CHECK(std::all_of(call.out.begin(), call.out.end(), [](float v) { return v == 7.0f; }));
    }
    ExpertTable partial(2, kHidden, kInter, 0.0f);
    layer.gate[0].put(partial, 0, Part::kGate);
    Call call(1, 1, 1);
    CHECK_THROWS_WITH_AS(call.run(moe, partial), doctest::Contains("expert 0 lacks"), std::invalid_argument);
    CHECK(moe.stats().calls == 0);
}

TEST_CASE("table refusals") {
    CHECK_THROWS_AS(ExpertTable(1, 100, 128, 0.0f), std::invalid_argument);
    CHECK_THROWS_AS(ExpertTable(1, 128, 0, 0.0f), std::invalid_argument);
    CHECK_THROWS_AS(ExpertTable(0, 128, 128, 0.0f), std::invalid_argument);
    CHECK_THROWS_AS(ExpertTable(1, 128, 128, std::nanf("")), std::invalid_argument);
    ExpertTable table(1, 128, 128, 0.0f);
    const std::vector<std::byte> trellis(128 * 128 * 3 / 8), scale(256);
    CHECK_THROWS_AS(table.set(1, Part::kUp, trellis, scale, scale, 3), std::out_of_range);
    CHECK_THROWS_AS(table.set(0, Part::kUp, trellis, scale, scale, 5), std::invalid_argument);
    CHECK_THROWS_WITH_AS(table.set(0, Part::kUp, trellis, scale, scale, 4),
                         "expert 0 up trellis: 6144 bytes, expected 8192", std::invalid_argument);
    table.set(0, Part::kUp, trellis, scale, scale, 3);
    table.set(0, Part::kUp, trellis, scale, scale, 3);
    CHECK(table[0].trellis_bytes == trellis.size());
    CHECK(!table[0].complete());
    CHECK_THROWS_AS(CpuMoe(3, std::vector<int>{0}, "auto"), std::invalid_argument);
    CHECK_THROWS_AS(CpuMoe(-1, {}, "auto"), std::invalid_argument);
}

TEST_CASE("several threads share one CpuMoe") {
    const Layer layer(3, 3);
    CpuMoe moe(3, {}, "auto");
    Call expected(4, 2, 3);
    expected.run(moe, layer.table);
    std::vector<Call> calls(4, Call(4, 2, 3));
    std::vector<std::thread> threads;
    for (Call& call : calls) {
        threads.emplace_back([&] {
            for (int i = 0; i < 5; ++i) call.run(moe, layer.table);
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Call& call : calls) CHECK(call.out == expected.out);
}
