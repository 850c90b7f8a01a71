// The CPU/GPU split: small steps by hand, every subset by brute force, and after real steps of the cache policy.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "cache/clock_admin.h"
#include "cache/split.h"

using namespace glm53;

namespace {

// The constants of the cost model's reference host, with rows free of charge unless a test sets them.
SplitConfig reference() {
    SplitConfig c;
    c.handoff_ns = 110'000;
    c.cpu_expert_ns = 104'000;
    c.cpu_row_ns = 0;
    c.pcie_expert_ns = 400'000;
    c.cached_ns = 100'000;
    return c;
}

// A step as clock_step leaves it: expert u has `rows` rows and is a miss with heat `heat`, or a hit when heat is -1, or
// admitted when it is -2.
struct Case {
    ClockStep step{};
    ClockScratch clock{};

    Case(const std::vector<int>& heat, const std::vector<int>& rows) {
        step.unique = static_cast<int>(heat.size());
        for (int u = 0; u < step.unique; ++u) {
            const int h = heat[static_cast<size_t>(u)];
            step.expert[u] = 100 + u;
            step.rows[u] = rows[static_cast<size_t>(u)];
            step.kind[u] = h == -1 ? PickKind::Hit : h == -2 ? PickKind::Admitted : PickKind::Miss;
            step.hits += h == -1;
            step.admitted += h == -2;
            clock.miss_key[u] = h < 0 ? kNoKey : (kScoreMax - static_cast<std::uint32_t>(h)) << 8 | u;
        }
    }
    static Case misses(int n) {
        std::vector<int> heat;
        for (int i = 0; i < n; ++i) heat.push_back(10 * i);
        return {heat, std::vector<int>(static_cast<size_t>(n), 1)};
    }
    SplitStep split(const SplitConfig& c) const {
        REQUIRE(split_config_error(c) == nullptr);
        SplitStep out;
        SplitScratch scratch;
        split_step(c, step, clock, out, scratch, SerialLanes{});
        return out;
    }
};

std::vector<int> on_cpu(const SplitStep& out, int unique) {
    std::vector<int> found;
    for (int u = 0; u < unique; ++u) {
        if (out.on_cpu[u]) found.push_back(u);
    }
    return found;
}

std::uint64_t subset_ns(const SplitConfig& c, const ClockStep& step, unsigned subset) {
    std::uint64_t cpu = subset ? c.handoff_ns : 0, gpu = c.cached_ns;
    for (int u = 0; u < step.unique; ++u) {
        if (step.kind[u] == PickKind::Hit) continue;
        if (subset >> u & 1u) {
            cpu += static_cast<std::uint64_t>(c.cpu_expert_ns) + c.cpu_row_ns * (step.rows[u] - 1);
        } else {
            gpu += c.pcie_expert_ns;
        }
    }
    return std::max(cpu, gpu);
}

using Ints = std::vector<int>;

}  // namespace

TEST_CASE("counts and times of the reference host, worked out on paper") {
    // misses, of them on the CPU, min over c of max(0.11 + 0.104 c, 0.10 + 0.40 (n - c)) in microseconds
    const int expected[][3] = {{0, 0, 100}, {1, 1, 214}, {2, 2, 318}, {3, 3, 422}, {4, 3, 500},
                               {5, 4, 526}, {6, 5, 630}, {7, 6, 734}, {8, 7, 838}};
    for (const auto& [n, cpu, us] : expected) {
        CAPTURE(n);
        const SplitStep out = Case::misses(n).split(reference());
        CHECK(out.misses == n);
        CHECK(out.cpu == cpu);
        CHECK(std::max(out.cpu_ns, out.gpu_ns) == static_cast<std::uint32_t>(us) * 1000);
    }
}

TEST_CASE("the coldest misses go to the CPU; hits and admitted experts never do") {
    const Case c({50, -1, 10, 90, -2, 30, 20}, Ints(7, 1));
    const SplitStep out = c.split(reference());  // 6 misses, 5 of them movable
    CHECK(out.misses == 6);
    CHECK(out.cpu == 5);
    CHECK(on_cpu(out, 7) == Ints{0, 2, 3, 5, 6});
    SplitConfig three = reference();
    three.max_cpu = 3;
    CHECK(on_cpu(c.split(three), 7) == Ints{2, 5, 6});
    three.max_cpu = 1;
    CHECK(on_cpu(c.split(three), 7) == Ints{2});
}

TEST_CASE("equal heat is told apart, equal times leave the expert on the GPU") {
    CHECK(on_cpu(Case({7, 7, 7}, Ints(3, 1)).split([] {
              SplitConfig c = reference();
              c.max_cpu = 2;
              return c;
          }()),
                 3) == Ints{1, 2});  // the earlier pick counts as the hotter one
    SplitConfig even = reference();
    even.handoff_ns = 100'000;
    even.cpu_expert_ns = 400'000;  // one expert: 500 us on either lane
    CHECK(Case::misses(1).split(even).cpu == 0);
    even.cpu_expert_ns -= 1;
    CHECK(Case::misses(1).split(even).cpu == 1);
}

TEST_CASE("lane off, no misses, nothing picked") {
    SplitConfig off = reference();
    off.max_cpu = 0;
    const SplitStep out = Case::misses(5).split(off);
    CHECK(out.cpu == 0);
    CHECK(out.cpu_ns == 0);
    CHECK(out.gpu_ns == 2'100'000);
    CHECK(on_cpu(out, 5).empty());
    CHECK(Case({-1, -1, -2}, Ints(3, 1)).split(reference()).cpu == 0);
    CHECK(Case({}, {}).split(reference()).misses == 0);
}

TEST_CASE("rows cost on the CPU alone") {
    SplitConfig c = reference();
    c.cpu_row_ns = 300'000;
    CHECK(Case({1}, {1}).split(c).cpu == 1);
    CHECK(Case({1}, {2}).split(c).cpu == 0);  // 110 + 104 + 300 us against 500 us
    CHECK(on_cpu(Case({1, 2}, {1, 8}).split(c), 2) == Ints{0});
}

TEST_CASE("no prefix is better, and without row costs no subset is") {
    std::mt19937 random(5);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    for (int trial = 0; trial < 2000; ++trial) {
        Ints heat, rows;
        const int n = below(11);
        for (int u = 0; u < n; ++u) {
            heat.push_back(below(24) - 2);
            rows.push_back(1 + below(8));
        }
        const Case c(heat, rows);
        SplitConfig config{below(400'000), below(400'000), trial % 2 ? 0 : below(90'000),
                           below(900'000), below(300'000), below(12)};
        const SplitStep out = c.split(config);
        unsigned movable = 0, chosen = 0;
        for (int u = 0; u < n; ++u) {
            if (c.step.kind[u] == PickKind::Miss) movable |= 1u << u;
            if (out.on_cpu[u]) chosen |= 1u << u;
        }
        REQUIRE((chosen & ~movable) == 0);
        REQUIRE(__builtin_popcount(chosen) == out.cpu);
        REQUIRE(std::max(out.cpu_ns, out.gpu_ns) == subset_ns(config, c.step, chosen));
        for (unsigned subset = 0; subset < 1u << n; ++subset) {
            bool coldest = true;  // a prefix of the order: nothing outside is colder than something inside
            for (int a = 0; a < n; ++a) {
                for (int b = 0; b < n; ++b) {
                    const bool skipped = (movable >> a & 1u) && !(subset >> a & 1u) && (subset >> b & 1u);
                    coldest &= !skipped || c.clock.miss_key[a] < c.clock.miss_key[b];
                }
            }
            if ((subset & ~movable) || __builtin_popcount(subset) > config.max_cpu) continue;
            if (config.cpu_row_ns && !coldest) continue;
            REQUIRE(subset_ns(config, c.step, chosen) <= subset_ns(config, c.step, subset));
        }
    }
}

TEST_CASE("64 slow misses do not overflow") {
    SplitConfig slow{kSplitMaxNs, kSplitMaxNs, kSplitMaxNs, kSplitMaxNs, kSplitMaxNs, kClockMaxPicks};
    const Case c(Ints(64, 5), Ints(64, 8));
    const SplitStep out = c.split(slow);
    CHECK(out.misses == 64);
    CHECK(out.cpu == 0);  // every time is cut to the same largest one
    CHECK(out.gpu_ns == kNoKey - 1);
    CHECK(split_config_error({-1, 0, 0, 0, 0, 0}) != nullptr);
    CHECK(split_config_error({0, 0, 0, kSplitMaxNs + 1, 0, 0}) != nullptr);
    CHECK(split_config_error({0, 0, 0, 0, 0, -1}) != nullptr);
}

TEST_CASE("after a step of the cache policy: the picks seen least often go to the CPU") {
    ClockConfig config;
    config.layers = 1;
    config.experts = 16;
    config.slots = 2;
    config.max_admissions = 2;
    std::vector<std::uint64_t> block(clock_bytes(config) / 8 + 1);
    clock_init(block.data(), config);
    const ClockView view = clock_view(block.data(), config);
    ClockStep step;
    ClockScratch clock;
    SplitScratch scratch;
    SplitStep out;
    const auto run = [&](std::vector<std::int64_t> picks, int rows, int admissions) {
        clock_step(view, 0, picks.data(), static_cast<int>(picks.size()), rows, admissions, step, clock, SerialLanes{});
        split_step(reference(), step, clock, out, scratch, SerialLanes{});
    };
    run({1, 2}, 1, 2);  // both admitted into the empty slots
    CHECK(out.misses == 2);
    CHECK(out.cpu == 0);
    run({3, 4, 4, 5}, 2, 0);
    CHECK(out.cpu == 3);
    run({5, 1, 9, 4, 3}, 1, 0);  // 1 is a hit; 9 is new, 3 and 5 were seen once, 4 twice
    CHECK(out.misses == 4);
    CHECK(out.cpu == 3);
    CHECK(on_cpu(out, 5) == Ints{0, 2, 4});
}

TEST_CASE("misses in a staging buffer are hits to the split") {
    Case c({50, 40, -1, 30, -2}, {1, 1, 1, 1, 1});
    c.step.hits = 1;
    std::vector<std::uint64_t> at(105);
    const std::uint64_t home = 4096, stride = 64;
    for (std::size_t e = 0; e < at.size(); ++e) at[e] = home + e * stride;
    at[101] = 1;  // the second miss
    at[102] = 2;  // a hit: in a slot, wherever it would be without
    split_staged({at.data(), home, stride}, c.step, c.clock, SerialLanes{});
    CHECK(c.step.hits == 2);
    SplitConfig all;
    all.handoff_ns = all.cpu_expert_ns = all.cpu_row_ns = 0;
    const SplitStep out = c.split(all);
    CHECK(out.misses == 3);
    CHECK(on_cpu(out, 5) == Ints{0, 3});
}
