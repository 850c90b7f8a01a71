// ExpertRuntime with a CPU lane: what the device's part and the CPU's part come to together. For the device that
// make_test_device() gives and as many random steps as soak_steps() says; the including file defines both.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "cpu/lane.h"
#include "small_runtime.h"

std::shared_ptr<glm53::Device> make_test_device();
int soak_steps();

using namespace glm53;
using namespace glm53::test;
using namespace std::chrono_literals;
using cpu::CpuLane;
using cpu::LaneVerdict;

namespace {

constexpr int kLayers = 2, kExperts = 10, kTopK = 4, kSlots = 6;

// Sends about half of what is missing to the CPU, nothing when it is one expert.
SplitConfig even_split() {
    SplitConfig c;
    c.handoff_ns = 60'000;
    c.cpu_expert_ns = c.pcie_expert_ns = 100'000;
    c.cpu_row_ns = 20'000;
    c.cached_ns = 20'000;
    c.max_admissions = 8;
    return c;
}

cpu::LaneOptions quick() {
    cpu::LaneOptions options;
    options.threads = 2;
    options.spin = 50us;
    options.poll = 200us;
    options.limit = 60s;  // a busy machine is no stall
    return options;
}

struct World : SmallRuntime {
    HostArena arena{cpu::lane_block_bytes(kHidden), "CPU lane", device};
    std::mt19937 random{5};

    explicit World(int max_admissions = 1)
        : SmallRuntime(make_test_device(), kLayers, kExperts, kSlots, max_admissions) {}

    std::unique_ptr<CpuLane> lane(cpu::LaneOptions options = quick()) {
        return std::make_unique<CpuLane>(lane_tables(), std::span(arena.data(), arena.bytes()), options);
    }
    void attach(std::chrono::milliseconds limit = 20s) { runtime->attach_lane(arena, kHidden, even_split(), limit); }
    StepData next(int layer, int rows) { return {random, layer, rows, kTopK, kExperts, 1.7}; }
    RuntimeStats stats() { return runtime->stats(nullptr); }
};

// Largest difference, in units of the largest value.
double difference(const std::vector<float>& a, const std::vector<float>& b) {
    double worst = 0, size = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        worst = std::max(worst, std::abs(static_cast<double>(a[i]) - b[i]));
        size = std::max(size, std::abs(static_cast<double>(b[i])));
    }
    return worst / size;
}

int zeros(const StepData& step) {
    return static_cast<int>(std::count(step.weights.begin(), step.weights.end(), 0));
}

}  // namespace

TEST_CASE("random steps: both parts together are all picks, and every decision is the policy's and the split's") {
    World w;
    const auto lane = w.lane();
    w.attach();
    SmallRuntime exact(make_host_device(), kLayers, kExperts, kSlots, 1);
    ExpertCacheConfig shadow_config;
    shadow_config.clock = {kLayers, kExperts, kSlots};
    shadow_config.clock.max_admissions = 1;
    shadow_config.clock.margin = 0;
    shadow_config.part_bytes = {1};
    const std::vector<const void*> no_homes(kLayers * kExperts, &w);
    ExpertCache shadow(make_host_device(), shadow_config, no_homes);
    double worst = 0;
    int decisions = 0, untouched = 0, changed = 0;
    std::uint64_t experts = 0, steps = 0;
    const int all_steps = std::min(soak_steps(), 2000);
    for (int i = 0; i < all_steps; ++i) {
        StepData step = w.next(i % kLayers, 1 + static_cast<int>(w.random() % 8));
        const StepData before = step;
        const ClockStep& decided = shadow.step(step.layer, step.picks, step.rows, 1, nullptr);
        SplitStep expected;
        SplitScratch scratch;
        split_step(even_split(), decided, shadow.scratch(), expected, scratch, SerialLanes{});
        exact.runtime->decode(step.layer, step.picks.data(), step.n(), step.rows, nullptr);
        w.split(step);
        for (int p = 0; p < step.n(); ++p) {
            const bool on_cpu = expected.on_cpu[decided.unique_of[p]] != 0;
            const auto at = static_cast<std::size_t>(p);
            decisions += step.weights[at] != (on_cpu ? 0 : before.weights[at]);
        }
        changed += step.picks != before.picks || step.x != before.x;
        experts += static_cast<std::uint64_t>(expected.cpu);
        steps += expected.cpu > 0;
        std::vector<float> out = w.sum_by_tables(step);
        w.add(out);
        untouched += expected.cpu == 0;
        worst = std::max(worst, difference(out, w.sum_at_home(before)));
    }
    CHECK(worst < 1e-5);
    CHECK(decisions == 0);
    CHECK(changed == 0);
    CHECK(untouched > 0);
    CHECK(w.runtime->residency(nullptr) == exact.runtime->residency(nullptr));
    const RuntimeStats stats = w.stats();
    CHECK(stats.cpu_picks == experts);
    CHECK(stats.cpu_steps == steps);
    CHECK(stats.cpu_steps == lane->stats().jobs);
    CHECK(stats.cpu_bytes == experts * kExpertBytes);
    CHECK(stats.cpu_bytes == lane->stats().expert_bytes);
    CHECK(stats.cache.home_bytes + stats.cpu_bytes == exact.runtime->stats(nullptr).cache.home_bytes);
    CHECK(stats.cache.counters.evictions > static_cast<std::uint64_t>(all_steps / 20));
    CHECK(w.runtime->lane_verdict() == LaneVerdict::kOk);
}

TEST_CASE("a sum in fp16 is rounded once") {
    World w;
    const auto lane = w.lane();
    w.attach();
    for (int i = 0; i < 50; ++i) {
        StepData step = w.next(0, 1 + i % 8);
        w.split(step);
        std::vector<std::uint16_t> out;
        for (const float value : w.sum_by_tables(step)) out.push_back(float_to_half(value));
        const std::vector<std::uint16_t> before = out;
        w.add(out);
        const float* sum = cpu::lane_slot(w.arena.data(), kHidden, cpu::lane_last_job(w.arena.data(), kHidden)).result;
        for (std::size_t v = 0; v < out.size(); ++v) {
            const float exact = half_to_float(before[v]) + (zeros(step) ? sum[v] : 0.0f);
            REQUIRE(out[v] == float_to_half(exact));
        }
    }
    CHECK(w.stats().cpu_steps > 10);
}

TEST_CASE("a lane that stalls: no partial sum, a verdict in time, then everything stays on the GPU") {
    World w;
    std::atomic<bool> release{false};
    cpu::LaneOptions options = quick();
    std::chrono::milliseconds wait = 20s;
    LaneVerdict expected = LaneVerdict::kStalled;
    SUBCASE("noticed by the lane") {
        options.limit = 2s;  // the first jobs must keep it on a busy machine too
    }
    SUBCASE("noticed by who waits") {
        options.limit = 60s;
        wait = 2s;
    }
    SUBCASE("a worker dies") {
        expected = LaneVerdict::kDied;
    }
    options.on_job = [&](int worker, std::uint32_t job) {
        if (worker != 1 || job != 3) return;
        if (expected == LaneVerdict::kDied) throw std::runtime_error("out of luck");
        while (!release) std::this_thread::sleep_for(1ms);
    };
    const auto lane = w.lane(options);
    w.attach(wait);
    const auto begin = std::chrono::steady_clock::now();
    int failed_after = 0;
    std::vector<float> out, before;
    while (w.runtime->lane_verdict() == LaneVerdict::kOk && failed_after < 100) {
        StepData step = w.next(0, 4);
        w.split(step);
        before = out = w.sum_by_tables(step);
        w.add(out);
        ++failed_after;
    }
    CHECK(std::chrono::steady_clock::now() - begin < 30s);
    CHECK(w.runtime->lane_verdict() == expected);
    CHECK(out == before);
    CHECK(w.stats().cpu_steps == 3);
    int diverted = 0;
    double worst = 0;
    for (int i = 0; i < 50; ++i) {
        StepData step = w.next(i % kLayers, 3);
        w.split(step);
        diverted += zeros(step);
        out = w.sum_by_tables(step);
        w.add(out);
        worst = std::max(worst, difference(out, w.sum_at_home(step)));
    }
    CHECK(diverted == 0);
    CHECK(worst < 1e-5);
    CHECK(w.stats().cpu_steps == 3);
    release = true;
    w.runtime->detach_lane(nullptr);
    CHECK(w.runtime->lane_verdict() == LaneVerdict::kOk);
}

TEST_CASE("a new lane in the same arena after one that failed") {
    World w;
    w.attach(50ms);  // nobody serves it
    std::vector<float> out(kHidden);
    while (w.runtime->lane_verdict() == LaneVerdict::kOk) {
        StepData step = w.next(0, 1);
        w.split(step);
        w.add(out);
    }
    CHECK(w.runtime->lane_verdict() == LaneVerdict::kStalled);
    w.runtime->detach_lane(nullptr);
    const auto lane = w.lane();
    w.attach();
    for (int i = 0; i < 100; ++i) {
        StepData step = w.next(0, 2);
        const StepData all = step;
        w.split(step);
        out = w.sum_by_tables(step);
        w.add(out);
        REQUIRE(difference(out, w.sum_at_home(all)) < 1e-5);
    }
    CHECK(lane->stats().jobs > 10);
}

TEST_CASE("attached, detached and attached again: job numbers and counters go on") {
    World w;
    const auto lane = w.lane();
    std::vector<float> out;
    for (int round = 0; round < 5; ++round) {
        w.attach();
        CHECK(w.runtime->has_lane());
        CHECK_THROWS_AS(w.attach(), std::logic_error);
        for (int i = 0; i < 41; ++i) {
            StepData step = w.next(0, 2);
            const StepData all = step;
            w.split(step);
            if (i == 40) break;  // its sum is never asked for
            out = w.sum_by_tables(step);
            w.add(out);
            REQUIRE(difference(out, w.sum_at_home(all)) < 1e-5);
        }
        w.runtime->detach_lane(nullptr);
        w.runtime->detach_lane(nullptr);
        CHECK(lane->stats().jobs == w.stats().cpu_steps);
    }
    CHECK(lane->stats().jobs > 50);
    CHECK_FALSE(w.runtime->has_lane());
}

TEST_CASE("a sum that nobody asked for is dropped by whatever comes next") {
    World w;
    const auto lane = w.lane();
    w.attach();
    const std::vector<float> ones(kHidden, 1.0f);
    std::vector<float> out = ones;
    for (int i = 0; i < 60; ++i) {
        StepData lost = w.next(0, 2);
        w.split(lost);
        StepData step = w.next(1, 1);
        w.put(step);
        if (i % 3 == 0) w.runtime->decode(1, w.picks.at(), step.n(), 1, nullptr);
        if (i % 3 == 1) w.runtime->prompt(1, w.picks.at(), step.n(), 1, nullptr);
        if (i % 3 == 2) {
            const StepData all = step;
            w.split(step);
            std::vector<float> sum = w.sum_by_tables(step);
            w.add(sum);
            REQUIRE(difference(sum, w.sum_at_home(all)) < 1e-5);
        }
        w.add(out);
    }
    CHECK(out == ones);
    CHECK(lane->stats().jobs > 20);
}

TEST_CASE("new constants count from the next step on; misses in staging buffers stay on the GPU") {
    World w(0);
    const auto lane = w.lane();
    w.attach();
    const auto sent = [&](int layer) {
        StepData step = w.next(layer, 1);
        std::vector<float> out(kHidden);
        w.split(step);
        w.add(out);
        return zeros(step);
    };
    CHECK(sent(1) > 0);
    SplitConfig off = even_split();
    off.max_cpu = 0;
    w.runtime->set_split(off, nullptr);
    CHECK(sent(1) == 0);
    SplitConfig greedy;
    greedy.handoff_ns = greedy.cpu_expert_ns = greedy.cpu_row_ns = 0;
    w.runtime->set_split(greedy, nullptr);
    CHECK(sent(1) == kTopK);
    w.picks.put({0, 1, 2});
    w.runtime->begin_prompt(kExperts * kExpertBytes, nullptr, nullptr);
    for (int layer = 0; layer < kLayers; ++layer) w.runtime->enter_layer(layer, w.picks.at(), 3, 3);
    w.runtime->finish_prompt();
    CHECK(sent(1) == 0);
    w.runtime->free_staging();
    CHECK(sent(1) == kTopK);
    off.handoff_ns = -1;
    CHECK_THROWS_AS(w.runtime->set_split(off, nullptr), std::invalid_argument);
}

TEST_CASE("while the lane is on a step admits as many misses as the split allows, else as the policy does") {
    World w(3);
    auto lane = w.lane();
    const auto admitted = [&] {
        const std::uint64_t before = w.stats().cache.counters.admissions;
        StepData step = w.next(0, 4);
        for (std::size_t i = 0; i < step.picks.size(); ++i) step.picks[i] = static_cast<std::int64_t>(i % kExperts);
        std::vector<float> out(step.x.size());
        w.split(step);
        w.add(out);
        return w.stats().cache.counters.admissions - before;
    };
    SplitConfig split = even_split();
    split.max_admissions = 1;
    w.runtime->attach_lane(w.arena, kHidden, split, 20s);
    CHECK(admitted() == 1);
    split.max_admissions = 0;
    w.runtime->set_split(split, nullptr);
    CHECK(admitted() == 0);
    split.max_cpu = 0;  // the lane is off
    w.runtime->set_split(split, nullptr);
    CHECK(admitted() == 3);
    CHECK(SplitConfig{}.max_admissions == 1);
    split.max_admissions = -1;
    CHECK_THROWS_AS(w.runtime->set_split(split, nullptr), std::invalid_argument);
}

TEST_CASE("lanes and steps that do not fit are refused") {
    World w;
    StepData step = w.next(0, 2);
    std::vector<float> out(2 * kHidden);
    CHECK_THROWS_AS(w.split(step), std::logic_error);
    CHECK_THROWS_AS(w.add(out), std::logic_error);
    CHECK_THROWS_AS(w.runtime->set_split({}, nullptr), std::logic_error);
    const auto refuses = [&](HostArena& arena, int hidden, std::chrono::milliseconds limit) {
        CHECK_THROWS_AS(w.runtime->attach_lane(arena, hidden, {}, limit), std::invalid_argument);
        CHECK_FALSE(w.runtime->has_lane());
    };
    HostArena small(4096, "small"), sealed(cpu::lane_block_bytes(kHidden), "sealed");
    sealed.seal();
    refuses(small, kHidden, 1s);
    refuses(sealed, kHidden, 1s);
    refuses(w.arena, kHidden + 1, 1s);
    refuses(w.arena, 0, 1s);
    refuses(w.arena, kHidden, 0ms);
    SplitConfig wrong;
    wrong.max_cpu = -1;
    CHECK_THROWS_AS(w.runtime->attach_lane(w.arena, kHidden, wrong, 1s), std::invalid_argument);
    const auto lane = w.lane();
    w.attach();
    const auto n = [&](int picks, int rows) {
        w.runtime->decode_split(0, w.picks.at(), picks, rows, w.x.at(), w.weights.at(), nullptr);
    };
    CHECK_THROWS_AS(n(7, 2), std::invalid_argument);
    CHECK_THROWS_AS(n(9, 9), std::invalid_argument);
    CHECK_THROWS_AS(n(0, 0), std::invalid_argument);
    CHECK_THROWS_AS(n(65, 1), std::invalid_argument);
    w.split(step);
    out.resize(kHidden);
    CHECK_THROWS_AS(w.add(out), std::invalid_argument);  // of two rows
}
