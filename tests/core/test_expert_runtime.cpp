// ExpertRuntime on the host device: whatever moves, every table entry leads to its expert's bytes.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "cache/expert_runtime.h"
#include "routing_trace.h"

using namespace glm53;

namespace {

constexpr std::size_t kParts[] = {512, 256, 300};  // the last one is padded to 512
constexpr std::size_t kStride = 512 + 256 + 512;

struct World {
    int layers, experts;
    std::shared_ptr<HostDevice> device = make_host_device();
    std::vector<std::vector<unsigned char>> homes;
    std::vector<std::vector<std::int64_t>> tables;
    std::unique_ptr<ExpertRuntime> runtime;
    int compute = 0, copy = 0;  // streams are tags on the host device

    World(int layer_count, int expert_count, int slots, int segment_slots = 4, int max_admissions = 8)
        : layers(layer_count), experts(expert_count) {
        std::mt19937 random(7);
        std::vector<LayerTables> described;
        for (int l = 0; l < layers; ++l) {
            homes.emplace_back(kStride * static_cast<std::size_t>(experts));
            for (auto& byte : homes.back()) byte = static_cast<unsigned char>(random());
            LayerTables t{};
            for (auto& part : t.part) {
                tables.emplace_back(static_cast<std::size_t>(experts), 0);
                part = tables.back().data();
            }
            t.home = reinterpret_cast<std::uint64_t>(homes.back().data());
            described.push_back(t);
        }
        ExpertRuntimeConfig config;
        config.clock.layers = layers;
        config.clock.experts = experts;
        config.clock.slots = slots;
        config.clock.max_admissions = max_admissions;
        config.clock.margin = 0;
        config.part_bytes.assign(std::begin(kParts), std::end(kParts));
        config.segment_slots = segment_slots;
        runtime = std::make_unique<ExpertRuntime>(device, config, described);
    }
    ~World() { device->defer(false); }

    std::int64_t at(int layer, int expert, int part) const { return tables[layer * 3 + part][expert]; }
    bool at_home(int layer, int expert) const {
        return at(layer, expert, 0) ==
               reinterpret_cast<std::int64_t>(homes[layer].data() + kStride * static_cast<std::size_t>(expert));
    }
    int wrong(int layer) const {
        int n = 0;
        std::size_t offset = 0;
        for (int part = 0; part < 3; ++part) {
            for (int e = 0; e < experts; ++e) {
                const unsigned char* home = homes[layer].data() + kStride * static_cast<std::size_t>(e) + offset;
                n += std::memcmp(reinterpret_cast<const void*>(at(layer, e, part)), home, kParts[part]) != 0;
            }
            offset += part == 0 ? 512 : 256;
        }
        return n;
    }
    int wrong() const {
        int n = 0;
        for (int l = 0; l < layers; ++l) n += wrong(l);
        return n;
    }
    void decode(int layer, const std::vector<std::int64_t>& picks, int rows = 1) {
        runtime->decode(layer, picks.data(), static_cast<int>(picks.size()), rows, &compute);
    }
    void long_prompt(std::size_t stage_bytes) { long_prompt(stage_bytes, layers, 0); }
    // A pass that enters `through` layers and was announced with `said`.
    void long_prompt(std::size_t stage_bytes, int through, int said) {
        std::vector<std::int64_t> picks;
        for (int e = 0; e < experts; ++e) picks.push_back(e);
        runtime->begin_prompt(stage_bytes, &compute, &copy, said);
        for (int l = 0; l < through; ++l) {
            runtime->enter_layer(l, picks.data(), experts, experts / 2);
            for (int e = 0; e < experts; ++e) {
                REQUIRE(runtime->expert_address(l, e) == static_cast<std::uint64_t>(at(l, e, 0)));
            }
            REQUIRE(wrong(l) == 0);
        }
        runtime->finish_prompt();
    }
};

}  // namespace

TEST_CASE("expert runtime: tables start at home and follow admissions and evictions") {
    World w(2, 6, 2);
    CHECK(w.wrong() == 0);
    w.decode(0, {1, 2});
    CHECK_FALSE(w.at_home(0, 1));
    CHECK_FALSE(w.at_home(0, 2));
    CHECK(w.wrong() == 0);
    for (int i = 0; i < 40; ++i) w.decode(1, {3, 4});
    CHECK(w.at_home(0, 1));  // both slots went to the hotter layer; the tables of layer 0 say so
    CHECK(w.at_home(0, 2));
    CHECK_FALSE(w.at_home(1, 3));
    CHECK(w.wrong() == 0);
    CHECK(w.runtime->verify(&w.compute).empty());
}

TEST_CASE("expert runtime: no admission leaves misses at home") {
    World w(1, 8, 4, 4, 0);
    w.decode(0, {0, 1, 2, 3});
    for (int e = 0; e < 8; ++e) CHECK(w.at_home(0, e));
    CHECK(w.runtime->stats(&w.compute).cache.counters.misses == 4);
}

TEST_CASE("expert runtime: 2,000 steps of churn, every entry right after each") {
    World w(4, 24, 20);
    RoutingSpec spec;
    spec.layers = 4;
    spec.experts = 24;
    spec.k = 4;
    spec.rows = 2;
    spec.steps = 500;
    spec.topic_steps = 25;
    spec.topic_deviation = 2.0;
    int wrong = 0, i = 0;
    for (const auto& picks : make_routing(spec)) {
        w.decode(i % 4, picks, 2);
        if (++i % 16 == 0) wrong += w.wrong();
    }
    CHECK(wrong == 0);
    CHECK(w.runtime->verify(&w.compute).empty());
    const RuntimeStats stats = w.runtime->stats(&w.compute);
    CHECK(stats.cache.counters.steps == 2000);
    CHECK(stats.cache.counters.evictions > 20);
}

TEST_CASE("expert runtime: a long prompt stages what is missing, layer by layer, and restores the tables") {
    World w(5, 10, 6);
    w.decode(0, {1, 2, 3});
    w.decode(3, {4, 5});
    SUBCASE("buffers hold a whole layer") {
        w.long_prompt(10 * kStride);
        CHECK(w.runtime->stats(&w.compute).staged_experts == 5 * 10 - 5);
    }
    SUBCASE("buffers hold three experts: the others are read at home") {
        w.long_prompt(3 * kStride + 100);
        CHECK(w.runtime->stats(&w.compute).staged_experts == 5 * 3);
    }
    SUBCASE("less than one expert still stages one") {
        w.long_prompt(1);
        CHECK(w.runtime->stats(&w.compute).staged_experts == 5);
    }
    w.runtime->free_staging();
    CHECK(w.wrong() == 0);
    CHECK_FALSE(w.at_home(0, 1));
    CHECK(w.at_home(1, 1));
}

TEST_CASE("expert runtime: the last two layers stay staged until the buffers are freed or filled again") {
    World w(5, 10, 6);
    const auto staged = [&](int layer) {  // entries that lead neither home nor into a slot
        const auto slots = w.runtime->residency(&w.compute);
        int n = 0;
        for (int e = 0; e < w.experts; ++e) n += slots[layer * w.experts + e] < 0 && !w.at_home(layer, e);
        return n;
    };
    w.decode(4, {1, 2});
    w.long_prompt(10 * kStride);
    CHECK(staged(2) == 0);
    CHECK(staged(3) == 10);
    CHECK(staged(4) == 8);
    CHECK(w.wrong() == 0);

    // The tail of the prompt and decode read there; admissions, evictions and lending keep every entry right.
    std::vector<std::int64_t> picks{0, 3, 5, 9};
    w.runtime->prompt(3, picks.data(), 4, 12, &w.compute);
    CHECK(staged(3) == 10);
    for (int i = 0; i < 30; ++i) w.decode(3, {0, 3, 5, 9});
    for (int i = 0; i < 60; ++i) w.decode(0, {4, 5, 6, 7, 8, 9});
    CHECK(w.runtime->stats(&w.compute).cache.counters.evictions > 0);
    CHECK(w.wrong() == 0);
    CHECK(staged(3) > 0);

    SUBCASE("freed: all back at home or in slots") {
        const std::size_t before = w.device->allocated_bytes();
        w.runtime->free_staging();
        CHECK(w.device->allocated_bytes() == before - 20 * kStride);
    }
    SUBCASE("lent, then freed") {
        w.runtime->lend(1, &w.compute);
        CHECK(w.wrong() == 0);
        w.runtime->free_staging();
    }
    SUBCASE("filled again by a pass that is given up at once") {
        w.runtime->begin_prompt(10 * kStride, &w.compute, &w.copy);
        w.runtime->finish_prompt();
    }
    SUBCASE("filled again by a pass that is given up half-way") {
        w.runtime->begin_prompt(10 * kStride, &w.compute, &w.copy);
        w.runtime->enter_layer(0, picks.data(), 4, 1);
        w.runtime->enter_layer(1, picks.data(), 4, 1);
        w.runtime->finish_prompt();
    }
    SUBCASE("buffers of another size") {
        w.runtime->begin_prompt(2 * kStride, &w.compute, &w.copy);
        CHECK(w.wrong() == 0);
        w.runtime->finish_prompt();
    }
    for (int layer = 0; layer < 5; ++layer) CHECK(staged(layer) == 0);
    CHECK(w.wrong() == 0);
    CHECK(w.runtime->verify(&w.compute).empty());
}

TEST_CASE("expert runtime: a pass that ends before the last layer brings and keeps only what it enters") {
    World w(5, 10, 6);
    const auto staged = [&](int layer) {
        int n = 0;
        for (int e = 0; e < w.experts; ++e) n += !w.at_home(layer, e);
        return n;
    };
    w.long_prompt(10 * kStride, 4, 4);
    CHECK(w.runtime->stats(&w.compute).staged_bytes == 4 * 10 * kStride);
    CHECK(staged(1) == 0);
    CHECK(staged(2) == 10);
    CHECK(staged(3) == 10);
    CHECK(staged(4) == 0);
    CHECK(w.wrong() == 0);

    SUBCASE("it goes further than was said: the layer is brought when it is entered, and kept") {
        w.long_prompt(10 * kStride, 5, 4);
        CHECK(w.runtime->stats(&w.compute).staged_bytes == 9 * 10 * kStride);
        CHECK(staged(2) == 0);
        CHECK(staged(3) == 10);
        CHECK(staged(4) == 10);
    }
    SUBCASE("far further") {
        w.long_prompt(10 * kStride, 5, 1);
        CHECK(staged(2) == 0);
        CHECK(staged(4) == 10);
    }
    SUBCASE("it ends earlier: what the buffers held is overwritten, nothing is kept") {
        w.long_prompt(10 * kStride, 3, 5);
        for (int layer = 0; layer < 5; ++layer) CHECK(staged(layer) == 0);
    }
    SUBCASE("one layer") {
        w.long_prompt(10 * kStride, 1, 1);
        CHECK(staged(0) == 10);
        CHECK(staged(3) == 0);
    }
    CHECK(w.wrong() == 0);
    w.runtime->free_staging();
    for (int layer = 0; layer < 5; ++layer) CHECK(staged(layer) == 0);
    CHECK_THROWS_AS(w.runtime->begin_prompt(kStride, &w.compute, &w.copy, 6), std::invalid_argument);
    CHECK_FALSE(w.runtime->in_prompt());
}

TEST_CASE("expert runtime: what still reads the kept buffers is waited for before they are filled again") {
    World w(2, 4, 1);
    w.long_prompt(4 * kStride);
    std::vector<unsigned char> result(kParts[0]);
    w.device->defer(true);
    w.device->copy_async(result.data(), reinterpret_cast<const void*>(w.at(1, 3, 0)), result.size(), &w.compute);
    w.runtime->begin_prompt(4 * kStride, &w.compute, &w.copy);  // a "kernel" of layer 1 was queued before
    CHECK(std::memcmp(result.data(), w.homes[1].data() + 3 * kStride, result.size()) == 0);
    w.device->defer(false);
    w.runtime->finish_prompt();
    CHECK(w.wrong() == 0);
}

TEST_CASE("expert runtime: the copy of layer L + 1 waits for the kernels of L - 1") {
    World w(4, 4, 1);
    w.device->defer(true);
    std::vector<std::int64_t> picks{0, 1, 2, 3};
    w.runtime->begin_prompt(4 * kStride, &w.compute, &w.copy);
    std::atomic<bool> entered = false;
    std::thread arriving([&] {  // runs copies until none can run for a while
        for (int idle = 0; idle < 30 || !entered;) {
            const bool ran = w.device->step(&w.copy);
            idle = ran ? 0 : idle + 1;
            if (!ran) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    });
    w.runtime->enter_layer(0, picks.data(), 4, 1);
    w.runtime->enter_layer(1, picks.data(), 4, 1);  // queues layer 2 into layer 0's buffer, behind `compute`
    entered = true;
    arriving.join();
    CHECK(w.device->pending(&w.copy) > 0);
    while (w.device->step(&w.compute)) {
    }
    CHECK(w.device->step(&w.copy));
    w.device->defer(false);
    CHECK(w.wrong(1) == 0);
    w.runtime->finish_prompt();
    CHECK(w.wrong() == 0);
}

TEST_CASE("expert runtime: a pass given up half-way leaves valid tables and can be started again") {
    World w(4, 6, 3);
    std::vector<std::int64_t> picks{0, 1};
    w.runtime->begin_prompt(6 * kStride, &w.compute, &w.copy);
    w.runtime->enter_layer(0, picks.data(), 2, 1);
    w.runtime->enter_layer(1, picks.data(), 2, 1);
    w.runtime->finish_prompt();
    CHECK_FALSE(w.runtime->in_prompt());
    w.runtime->free_staging();
    CHECK(w.wrong() == 0);
    w.runtime->begin_prompt(6 * kStride, &w.compute, &w.copy);
    w.runtime->finish_prompt();
    w.long_prompt(6 * kStride);
    CHECK(w.wrong() == 0);
}

TEST_CASE("expert runtime: misuse is refused") {
    World w(3, 4, 2);
    std::vector<std::int64_t> picks(65, 0);
    CHECK_THROWS_AS(w.decode(0, picks), std::invalid_argument);
    CHECK_THROWS_AS(w.decode(3, {0}), std::out_of_range);
    CHECK_THROWS_AS(w.runtime->enter_layer(0, picks.data(), 1, 1), std::logic_error);
    CHECK_THROWS_AS(w.runtime->expert_address(0, 0), std::logic_error);
    w.runtime->begin_prompt(kStride, &w.compute, &w.copy);
    CHECK_THROWS_AS(w.runtime->begin_prompt(kStride, &w.compute, &w.copy), std::logic_error);
    CHECK_THROWS_AS(w.runtime->enter_layer(1, picks.data(), 1, 1), std::logic_error);
    CHECK_THROWS_AS(w.runtime->lend(1, &w.compute), std::logic_error);
    CHECK_THROWS_AS(w.runtime->free_staging(), std::logic_error);
    CHECK_THROWS_AS(w.runtime->expert_address(0, 4), std::out_of_range);
    CHECK_THROWS_AS(w.runtime->expert_address(3, 0), std::out_of_range);
    w.runtime->finish_prompt();
}

TEST_CASE("expert runtime: lent slots leave the tables, come back empty and refill with the hottest") {
    World w(2, 12, 12, 4);
    for (int i = 0; i < 8; ++i) w.decode(0, {0, 1, 2, 3, 4, 5});
    w.decode(1, {6, 7, 8, 9});
    const std::size_t before = w.device->allocated_bytes();
    CHECK(w.runtime->lend(5 * kStride, &w.compute) == 8 * kStride);  // two segments of four
    CHECK(w.device->allocated_bytes() == before - 8 * kStride);
    CHECK(w.wrong() == 0);
    w.decode(0, {0, 1, 2, 10, 11});
    w.long_prompt(12 * kStride);
    w.runtime->free_staging();
    CHECK(w.wrong() == 0);
    CHECK(w.runtime->lend(1, &w.compute) == 4 * kStride);
    CHECK(w.runtime->lend(1, &w.compute) == 0);
    CHECK(w.runtime->take_back(&w.compute) == 12);
    CHECK(w.device->allocated_bytes() == before);
    for (int round = 0; round < 4; ++round) w.runtime->refill(8, &w.compute, &w.copy);
    const auto slots = w.runtime->residency(&w.compute);
    for (int e : {0, 1, 2}) CHECK(slots[e] >= 0);
    CHECK(w.runtime->stats(&w.compute).cache.counters.refills >= 8);
    CHECK(w.wrong() == 0);
    CHECK(w.runtime->verify(&w.compute).empty());
}

TEST_CASE("expert runtime: refill says that it is done when no copy is left to start or to publish") {
    World w(1, 12, 12);
    const std::vector<std::int64_t> picks{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    w.runtime->prompt(0, picks.data(), 11, 11, &w.compute);
    SUBCASE("copies that are done at once: more are to be started") {}
    SUBCASE("copies that take their time: they are to be published") {
        w.device->defer(true);
        CHECK(w.runtime->refill(2, &w.compute, &w.copy) == 2);
        CHECK(w.runtime->refill(0, &w.compute, &w.copy) == 2);
        w.device->defer(false);
    }
    int calls = 0;
    while (w.runtime->refill(2, &w.compute, &w.copy) > 0) REQUIRE(++calls < 12);
    const auto slots = w.runtime->residency(&w.compute);
    for (int e = 0; e < 11; ++e) CHECK(slots[e] >= 0);
    CHECK(slots[11] == -1);  // never picked
    CHECK(w.wrong() == 0);
}

TEST_CASE("expert runtime: memory that is not there any more leaves slots lent") {
    World w(1, 8, 8, 4);
    CHECK(w.runtime->lend(8 * kStride, &w.compute) == 8 * kStride);
    w.device->fail_next_alloc();
    CHECK(w.runtime->take_back(&w.compute) == 0);
    CHECK(w.runtime->take_back(&w.compute) == 8);
}

TEST_CASE("expert runtime: prompts count distinct picks and what of them is missing") {
    World w(1, 8, 4);
    w.decode(0, {0, 1});
    const std::vector<std::int64_t> picks{0, 2, 2, 3, 99, -1};
    w.runtime->prompt(0, picks.data(), 6, 3, &w.compute);
    const PromptCounters p = w.runtime->stats(&w.compute).prompts;
    CHECK(p.picks == 6);
    CHECK(p.distinct == 3);
    CHECK(p.missing == 2);
}
