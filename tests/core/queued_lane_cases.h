// ExpertRuntime with a CPU lane on a device that runs behind the host: steps queued without a wait in between, bit for
// bit what the lane computed.
#pragma once
#include "runtime_lane_cases.h"

namespace {

// A step's sum of the picks that lost their weights, computed as the lane does: bit for bit.
std::vector<float> diverted_sum(World& w, const StepData& before, const StepData& after) {
    StepData only = before;
    for (std::size_t i = 0; i < only.weights.size(); ++i) {
        if (after.weights[i] == before.weights[i]) only.weights[i] = 0;
    }
    return w.sum_at_home(only);
}

std::vector<float> random_rows(World& w, int rows) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(rows) * kHidden);
    for (float& value : values) value = normal(w.random);
    return values;
}

std::vector<float> plus(std::vector<float> a, const std::vector<float>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
}

}  // namespace

TEST_CASE("soak: steps without a wait between deciding and adding, bit for bit, as the host device decides") {
    const int steps = soak_steps();
    World w(2);
    const auto lane = w.lane();
    w.attach();
    SmallRuntime host(make_host_device(), kLayers, kExperts, kSlots, 2);
    HostArena host_arena(cpu::lane_block_bytes(kHidden), "host's lane");
    CpuLane host_lane(host.lane_tables(), {host_arena.data(), host_arena.bytes()}, quick());
    host.runtime->attach_lane(host_arena, kHidden, even_split(), 20s);
    int different = 0, decisions = 0, wrong = 0;
    for (int i = 0; i < steps; ++i) {
        StepData step = w.next(i % kLayers, 1 + static_cast<int>(w.random() % 8)), mirrored = step;
        const StepData before = step;
        const std::vector<float> base = random_rows(w, step.rows);
        w.put(step);
        w.out.put(base);
        w.queue_split(step);
        w.runtime->add_partial(step.rows, w.out.at(), false, nullptr);
        const std::vector<float> out = w.out.get(base.size());
        w.get(step);
        different += out != plus(base, diverted_sum(w, before, step));
        host.split(mirrored);
        std::vector<float> ignored(step.x.size());
        host.add(ignored);
        decisions += step.weights != mirrored.weights || step.picks != before.picks;
        if (i % 50 == 0) wrong += w.sum_by_tables(before) != w.sum_at_home(before);
    }
    CHECK(different == 0);
    CHECK(decisions == 0);
    CHECK(wrong == 0);
    CHECK(w.runtime->lane_verdict() == LaneVerdict::kOk);
    CHECK(w.runtime->residency(nullptr) == host.runtime->residency(nullptr));
    CHECK(w.runtime->verify(nullptr).empty());
    CHECK(w.stats().cpu_picks == host.runtime->stats(nullptr).cpu_picks);
    CHECK(w.stats().cache.counters.evictions > static_cast<std::uint64_t>(steps / 100));
    CHECK(lane->stats().jobs > static_cast<std::uint64_t>(steps / 2));
}

TEST_CASE("a stall in the midst of queued layers: the host waits for none of them, none gets a partial sum") {
    World w(0);
    std::atomic<bool> release{false};
    cpu::LaneOptions options = quick();
    options.limit = 300ms;
    options.on_job = [&](int worker, std::uint32_t job) {
        while (worker == 1 && job == 2 && !release) std::this_thread::sleep_for(1ms);
    };
    const auto lane = w.lane(options);
    w.attach(2s);
    StepData step = w.next(0, 4);
    w.put(step);
    const std::vector<float> base = random_rows(w, 4);
    w.out.put(base);
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 6; ++i) {  // all picks miss: the first step sends some, the others have no weights left to lose
        w.queue_split(step);
        w.runtime->add_partial(4, w.out.at(), false, nullptr);
    }
    const auto queued = std::chrono::steady_clock::now() - begin;
    CHECK(w.runtime->lane_verdict() == LaneVerdict::kOk);
    const std::vector<float> out = w.out.get(base.size());
    const auto done = std::chrono::steady_clock::now() - begin;
    CHECK(queued < 200ms);
    CHECK(done >= 250ms);
    CHECK(done < 2s);
    CHECK(w.runtime->lane_verdict() == LaneVerdict::kStalled);
    StepData after = step;
    w.get(after);
    CHECK(out == plus(base, diverted_sum(w, step, after)));  // of the first job alone
    CHECK(w.stats().cpu_steps == 2);
    release = true;
}

TEST_CASE("memory that the device cannot reach, and rows at odd addresses, are refused") {
    World w;
    HostArena unpinned(cpu::lane_block_bytes(kHidden), "not page-locked");
    CHECK_THROWS_AS(w.runtime->attach_lane(unpinned, kHidden, {}, 1s), std::invalid_argument);
    const auto lane = w.lane();
    w.attach();
    StepData step = w.next(0, 1);
    CHECK_THROWS_AS(w.runtime->decode_split(0, w.picks.at(), step.n(), 1, w.x.at() + 1, w.weights.at(), nullptr),
                    std::invalid_argument);
}
