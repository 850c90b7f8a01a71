// ExpertRuntime's kernels beside the host device: rows of the model's width, and steps that no lane takes part in.
#pragma once
#include "runtime_lane_cases.h"

TEST_CASE("rows as wide as the model's: every value goes to the lane and comes back into its place") {
    constexpr int kWide = 4096, kFew = 4;
    const auto device = make_test_device();
    HostArena block(cpu::lane_block_bytes(kWide), "wide lane", device), home(kFew * 768, "home", device);
    Both<std::int64_t> tables(device, 3 * kFew), picks(device, cpu::kLanePicks);
    Both<std::uint16_t> weights(device, cpu::kLanePicks), x(device, cpu::kLaneRows * kWide),
        half(device, cpu::kLaneRows * kWide);
    Both<float> out(device, cpu::kLaneRows * kWide);
    ExpertRuntimeConfig config;
    config.clock = {1, kFew, 1};
    config.clock.max_admissions = 0;
    config.part_bytes = {256, 256, 256};
    const LayerTables described{{tables.at(), tables.at() + kFew, tables.at() + 2 * kFew},
                                reinterpret_cast<std::uint64_t>(home.device_address())};
    ExpertRuntime runtime(device, config, {described});
    SplitConfig all;
    all.handoff_ns = all.cpu_expert_ns = all.cpu_row_ns = 0;
    runtime.attach_lane(block, kWide, all, 20s);
    std::atomic<bool> stop{false};
    std::thread doubling([&] {  // in place of a CpuLane
        for (std::uint32_t job = 1; !stop; ++job) {
            const cpu::LaneSlot slot = cpu::lane_slot(block.data(), kWide, job);
            while (!stop && std::atomic_ref(slot.job->published).load() != job) std::this_thread::yield();
            for (int i = 0; i < slot.job->rows * kWide; ++i) slot.result[i] = 2 * slot.x[i];
            std::atomic_ref(slot.done->word).store(cpu::lane_done_word(LaneVerdict::kOk, job));
        }
    });
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    int different = 0;
    for (int i = 0; i < 32; ++i) {
        const int rows = 1 + i % cpu::kLaneRows;
        const auto values = static_cast<std::size_t>(rows) * kWide;
        std::vector<std::uint16_t> in(values), half_base(values);
        std::vector<float> base(values);
        for (std::size_t v = 0; v < values; ++v) {
            in[v] = float_to_half(normal(random));
            base[v] = normal(random);
            half_base[v] = float_to_half(base[v]);
        }
        picks.put(std::vector<std::int64_t>(static_cast<std::size_t>(rows), i % kFew));
        weights.put(std::vector<std::uint16_t>(static_cast<std::size_t>(rows), float_to_half(1.0f)));
        x.put(in);
        out.put(base);
        half.put(half_base);
        runtime.decode_split(0, picks.at(), rows, rows, x.at(), weights.at(), nullptr);
        const bool as_half = i % 3 == 0;
        runtime.add_partial(rows, as_half ? static_cast<void*>(half.at()) : out.at(), as_half, nullptr);
        const std::vector<float> sum = out.get(values);
        const std::vector<std::uint16_t> half_sum = half.get(values);
        for (std::size_t v = 0; v < values; ++v) {
            const float twice = 2 * half_to_float(in[v]);
            different += sum[v] != (as_half ? base[v] : base[v] + twice);
            different += half_sum[v] != (as_half ? float_to_half(half_to_float(half_base[v]) + twice) : half_base[v]);
        }
    }
    stop = true;
    doubling.join();
    CHECK(different == 0);
    CHECK(runtime.lane_verdict() == LaneVerdict::kOk);
}

TEST_CASE("exact steps, prompts and lending with the device's kernels: as on the host, and every table right") {
    World w(3);
    SmallRuntime host(make_host_device(), kLayers, kExperts, kSlots, 3);
    int different = 0;
    for (int i = 0; i < 300; ++i) {
        StepData step = w.next(i % kLayers, 1 + static_cast<int>(w.random() % 8));
        w.put(step);
        const auto both = [&](auto call) {
            call(*w.runtime, w.picks.at());
            call(*host.runtime, step.picks.data());
        };
        if (i % 5 == 4) {
            both([&](ExpertRuntime& r, const std::int64_t* at) { r.prompt(step.layer, at, step.n(), 12, nullptr); });
        } else {
            both([&](ExpertRuntime& r, const std::int64_t* at) {
                r.decode(step.layer, at, step.n(), step.rows, nullptr);
            });
        }
        if (i % 40 == 20) both([](ExpertRuntime& r, const std::int64_t*) { r.lend(1, nullptr); });
        if (i % 40 == 30) {
            both([](ExpertRuntime& r, const std::int64_t*) {
                r.take_back(nullptr);
                while (r.refill(2, nullptr, nullptr) > 0) {
                }
            });
        }
        if (i % 100 == 99) {
            both([&](ExpertRuntime& r, const std::int64_t* at) {
                r.begin_prompt(3 * kExpertBytes, nullptr, nullptr);
                for (int layer = 0; layer < kLayers; ++layer) r.enter_layer(layer, at, step.n(), 12);
                r.finish_prompt();
            });
        }
        different += w.sum_by_tables(step) != w.sum_at_home(step);
        different += w.runtime->residency(nullptr) != host.runtime->residency(nullptr);
    }
    CHECK(different == 0);
    CHECK(w.runtime->verify(nullptr).empty());
    const RuntimeStats stats = w.stats(), expected = host.runtime->stats(nullptr);
    CHECK(stats.prompts.missing == expected.prompts.missing);
    CHECK(stats.cache.home_bytes == expected.cache.home_bytes);
    CHECK(stats.cache.counters.evictions > 20);
    CHECK(stats.cache.counters.refills > 5);
}
