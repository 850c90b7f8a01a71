// CpuMoe against the same experts computed in float64 from the decoded weights; small enough for the sanitizers.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/moe.h"
#include "small_experts.h"

using namespace glm53;
using namespace glm53::test;
using cpu::CpuMoe;

namespace {

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
                if (picks[static_cast<size_t>(i)] == cpu::kSkippedPick) continue;
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

TEST_CASE("same bits from run to run and on any number of threads") {
    const Layer layer(4, 3);
    for (const std::string& isa : cpu::available_isas()) {
        for (const int rows : {1, 3, 19, 256}) {
            if (rows == 256 && isa != cpu::available_isas().front()) continue;  // two waves; slow elsewhere
            Call one(rows, 3, 4);
            CpuMoe single(1, {}, isa);
            one.run(single, layer.table);
            int clamped[3] = {};
            if (rows < 256) CHECK(one.error(layer, clamped) < 1e-3);
            for (const int threads : {2, 3, 7}) {
                CpuMoe moe(threads, {}, isa);
                for (int run = 0; run < 5; ++run) {
                    Call call(rows, 3, 4);
                    call.run(moe, layer.table);
                    CHECK(call.out == one.out);
                }
            }
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

TEST_CASE("ragged calls: a skipped pick adds nothing, on any number of threads") {
    const Layer layer(4, 3);
    for (const int threads : {1, 3}) {
        CpuMoe moe(threads, {}, "auto");
        for (const unsigned seed : {1u, 2u, 3u}) {
            Call call(5, 3, 4, seed);
            std::mt19937 random(seed);
            for (int64_t& pick : call.picks) pick = random() % 2 ? pick : cpu::kSkippedPick;
            std::fill_n(call.picks.begin() + 3, 3, int64_t{cpu::kSkippedPick});  // row 1 has nothing here
            CHECK_THROWS_AS(call.run(moe, layer.table), std::out_of_range);
            const uint64_t before = moe.stats().picks;
            moe.forward(layer.table, {call.x.data(), call.picks.data(), call.weights.data(), call.out.data(), call.rows,
                                      call.top_k, true});
            CHECK(moe.stats().picks - before ==
                  static_cast<uint64_t>(std::count_if(call.picks.begin(), call.picks.end(),
                                                      [](int64_t p) { return p != cpu::kSkippedPick; })));
            CHECK(std::all_of(call.out.begin() + kHidden, call.out.begin() + 2 * kHidden,
                              [](float v) { return v == 0.0f; }));
            int clamped[3] = {};
            CHECK(call.error(layer, clamped) < 1e-3);
        }
    }
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
