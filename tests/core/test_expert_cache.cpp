// ExpertCache over the host device: addresses, copies held half-way, lending, refill, and bytes that always equal
// home's.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <vector>

#include "cache/expert_cache.h"
#include "routing_trace.h"

using namespace glm53;

namespace {

const StreamHandle kCompute = reinterpret_cast<StreamHandle>(1), kCopy = reinterpret_cast<StreamHandle>(2);

// Homes whose bytes tell entry and part, and a cache over them. Part sizes are no multiple of the slot alignment.
struct Rig {
    static constexpr std::size_t kParts[3] = {100, 256, 37};
    std::shared_ptr<HostDevice> device = make_host_device();
    std::vector<std::vector<char>> bytes;
    ExpertCacheConfig config;
    std::unique_ptr<ExpertCache> cache;

    Rig(int layers, int experts, int slots, int segment_slots = 4) {
        config.clock = {.layers = layers, .experts = experts, .slots = slots};
        config.part_bytes.assign(std::begin(kParts), std::end(kParts));
        config.segment_slots = segment_slots;
        for (int entry = 0; entry < layers * experts; ++entry) {
            for (int part = 0; part < 3; ++part) {
                bytes.emplace_back(kParts[part], static_cast<char>(entry * 3 + part + 1));
            }
        }
        cache = std::make_unique<ExpertCache>(device, config, homes());
    }
    std::vector<const void*> homes() const {
        std::vector<const void*> addresses;
        for (const auto& b : bytes) addresses.push_back(b.data());
        return addresses;
    }
    const ClockStep& step(int layer, std::vector<std::int64_t> picks, int limit = kClockMaxPicks) {
        return cache->step(layer, picks, 1, limit, kCompute);
    }
    void heat_up(int layer, int expert, int rows) {
        std::vector<std::int32_t> counts(static_cast<std::size_t>(config.clock.experts));
        counts[static_cast<std::size_t>(expert)] = rows;
        cache->note_rows(layer, counts, 1);
    }
    // What kernels would read: every part of the expert equals its home.
    bool reads_right(int layer, int expert) const {
        bool right = true;
        for (int part = 0; part < 3; ++part) {
            const auto& home = bytes[(layer * config.clock.experts + expert) * 3 + part];
            right = right && std::memcmp(cache->address(layer, expert, part), home.data(), home.size()) == 0;
        }
        return right;
    }
};

}  // namespace

TEST_CASE("admitted experts read from their slots, the others at home") {
    Rig rig(2, 8, 4);
    CHECK(rig.cache->slot_bytes() == 768);
    CHECK(rig.cache->part_offset(2) == 512);
    CHECK(rig.device->allocated_bytes() == 4 * 768);
    rig.step(1, {3, 5});
    CHECK(rig.cache->slot_of(1, 3) == 0);
    CHECK(rig.cache->slot_of(0, 3) == -1);
    CHECK(rig.cache->address(1, 5, 1) == static_cast<char*>(rig.cache->slot_address(1)) + 256);
    CHECK(rig.cache->address(0, 3, 2) == rig.bytes[11].data());
    for (int layer = 0; layer < 2; ++layer) {
        for (int e = 0; e < 8; ++e) CHECK(rig.reads_right(layer, e));
    }
    const ExpertCacheStats stats = rig.cache->stats();
    CHECK(stats.resident == 2);
    CHECK(stats.empty == 2);
    CHECK(stats.counters.misses == 2);
    CHECK(stats.admitted_bytes == 2 * 393);
    CHECK(stats.home_bytes == 0);
    rig.step(0, {1}, 0);
    CHECK(rig.cache->stats().home_bytes == 393);
    CHECK_THROWS_AS(rig.cache->address(2, 0, 0), std::out_of_range);
    CHECK_THROWS_AS(rig.cache->address(0, 8, 0), std::out_of_range);
    CHECK_THROWS_AS(rig.cache->address(0, 0, 3), std::out_of_range);
    CHECK_THROWS_AS(rig.step(0, std::vector<std::int64_t>(65, 0)), std::invalid_argument);
}

TEST_CASE("a victim's last readers and the copy over it keep the compute stream's order") {
    Rig rig(1, 8, 1);
    rig.step(0, {0});
    rig.device->defer(true);
    std::vector<char> read_old(100), read_new(100);
    rig.device->copy_async(read_old.data(), rig.cache->address(0, 0, 0), 100,
                           kCompute);  // a kernel that reads expert 0
    rig.heat_up(0, 1, 100);
    CHECK(rig.step(0, {1}).evicted[0] == 0);
    rig.device->copy_async(read_new.data(), rig.cache->address(0, 1, 0), 100, kCompute);
    CHECK(rig.reads_right(0, 0));        // repointed home at once
    CHECK_FALSE(rig.reads_right(0, 1));  // its copy has not run yet
    rig.device->run_all();
    CHECK(read_old == rig.bytes[0]);
    CHECK(read_new == rig.bytes[3]);
    CHECK(rig.cache->verify(kCompute).empty());
}

TEST_CASE("a refill is seen only after its own copy is done, and never overtakes the slot's last reader") {
    Rig rig(1, 8, 4);
    for (int e = 0; e < 8; ++e) rig.heat_up(0, e, e + 1);
    CHECK(rig.cache->refill_plan(3) == std::vector<std::int32_t>{7, 6, 5});
    rig.device->defer(true);
    std::vector<char> reader(100);
    rig.device->copy_async(reader.data(), rig.cache->slot_address(0), 100, kCompute);  // still reads an emptied slot
    CHECK(rig.cache->refill(2, kCopy, kCompute) == 2);
    CHECK_FALSE(rig.device->step(kCopy));  // waits for the reader
    CHECK(rig.cache->stats().loading == 2);
    CHECK(rig.cache->poll() == 2);
    CHECK(rig.cache->slot_of(0, 7) == -1);
    CHECK(rig.cache->refill_plan(2) == std::vector<std::int32_t>{5, 4});  // what is loading is not planned again
    while (rig.device->step(kCompute)) {
    }
    for (int op = 0; op < 5; ++op) CHECK(rig.device->step(kCopy));  // the wait, three parts, the first record
    std::vector<std::int32_t> published;
    CHECK(rig.cache->poll(&published) == 1);
    CHECK(published == std::vector<std::int32_t>{7});
    CHECK(rig.cache->slot_of(0, 7) == 0);
    CHECK(rig.reads_right(0, 7));
    rig.device->run_all();
    CHECK(rig.cache->poll(&published) == 0);
    CHECK(rig.cache->slot_of(0, 6) == 1);
    CHECK(rig.cache->verify(kCompute).empty());
    CHECK(rig.cache->stats().refilled_bytes == 2 * 393);
    CHECK(rig.cache->refill(9, kCopy, kCompute) == 2);  // two empty slots are left
    rig.device->run_all();
    CHECK(rig.cache->poll() == 0);
    CHECK(rig.cache->stats().resident == 4);
    CHECK(rig.cache->refill(9, kCopy, kCompute) == 0);
}

TEST_CASE("a segment is lent whole: as memory, or freed for someone else, and taken back empty") {
    Rig rig(1, 16, 10, 4);
    CHECK(rig.cache->segments() == 3);
    CHECK(rig.cache->segment_slots(2) == 2);
    rig.step(0, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
    rig.step(0, {8, 9});
    std::vector<std::int32_t> dropped;
    SUBCASE("as memory") {
        CHECK(rig.cache->lend(1, false, dropped) == rig.cache->slot_address(4));
        CHECK(rig.device->allocated_bytes() == 10 * 768);
        CHECK(rig.cache->take_back(1));
    }
    SUBCASE("freed") {
        CHECK(rig.cache->lend(1, true, dropped) == nullptr);
        CHECK(rig.device->allocated_bytes() == 6 * 768);
        CHECK(rig.cache->slot_address(4) == nullptr);
        rig.device->fail_next_alloc();
        CHECK_FALSE(rig.cache->take_back(1));
        CHECK(rig.cache->stats().lent == 4);
        CHECK(rig.cache->take_back(1));
        CHECK(rig.device->allocated_bytes() == 10 * 768);
    }
    CHECK(dropped == std::vector<std::int32_t>{4, 5, 6, 7});
    CHECK(rig.cache->slot_of(0, 4) == -1);
    CHECK(rig.cache->slot_of(0, 8) == 8);
    CHECK(rig.cache->stats().empty == 4);
    CHECK(rig.cache->stats().resident == 6);
    CHECK_THROWS_AS(rig.cache->take_back(1), std::logic_error);
    for (int e = 0; e < 16; ++e) CHECK(rig.reads_right(0, e));
    rig.step(0, {4});
    CHECK(rig.cache->slot_of(0, 4) == 4);
    CHECK(rig.cache->verify(kCompute).empty());
    CHECK_THROWS_AS(rig.cache->lend(3, false, dropped), std::out_of_range);
}

TEST_CASE("lending waits for loads in its segment and refuses pinned slots, changing nothing") {
    Rig rig(1, 8, 4, 2);
    rig.step(0, {0});
    rig.heat_up(0, 5, 9);
    rig.device->defer(true);
    CHECK(rig.cache->refill(1, kCopy, kCompute) == 1);
    std::vector<std::int32_t> dropped;
    CHECK(rig.cache->pin(0, 0));
    CHECK_THROWS_WITH_AS(rig.cache->lend(0, true, dropped), doctest::Contains("slot 0 of segment 0 is pinned"),
                         std::logic_error);
    CHECK(rig.cache->stats().loading == 1);
    CHECK(rig.cache->unpin(0, 0));
    CHECK_FALSE(rig.cache->unpin(0, 0));
    CHECK_FALSE(rig.cache->pin(0, 7));
    CHECK(rig.cache->lend(0, false, dropped) != nullptr);  // the borrower may write at once
    CHECK(dropped == std::vector<std::int32_t>{0});
    CHECK(rig.cache->stats().loading == 0);
    CHECK(rig.device->pending(kCopy) == 0);
    CHECK_THROWS_AS(rig.cache->lend(0, true, dropped), std::logic_error);
    CHECK(rig.cache->take_back(0));
    CHECK(rig.cache->stats().empty == 4);
}

TEST_CASE("a copy that could not be queued leaves no slot that looks resident") {
    Rig rig(1, 8, 4);
    SUBCASE("of an admission: those before it stay") {
        rig.device->fail_copy_after(4);  // of three parts an expert: the second expert's second
        CHECK_THROWS_AS(rig.step(0, {1, 2, 3}), DeviceFailure);
        CHECK(rig.cache->slot_of(0, 1) == 0);
        CHECK(rig.cache->stats().resident == 1);
    }
    SUBCASE("of a refill") {
        for (int e = 1; e < 4; ++e) rig.heat_up(0, e, e);
        rig.device->fail_copy_after(1);
        CHECK_THROWS_AS(rig.cache->refill(3, kCopy, kCompute), DeviceFailure);
        CHECK(rig.cache->poll() == 0);
        CHECK(rig.cache->slot_of(0, 1) == -1);
        CHECK(rig.cache->stats().resident == 0);
    }
    CHECK(rig.cache->slot_of(0, 2) == -1);
    CHECK(rig.cache->slot_of(0, 3) == -1);
    for (int e = 0; e < 8; ++e) CHECK(rig.reads_right(0, e));
    rig.step(0, {1, 2, 3, 4});  // all slots are to be had again
    CHECK(rig.cache->stats().resident == 4);
    for (int e = 0; e < 8; ++e) CHECK(rig.reads_right(0, e));
}

TEST_CASE("verify finds the slot and part that differ from home") {
    Rig rig(1, 8, 4);
    rig.step(0, {0, 1, 2});
    CHECK(rig.cache->verify(kCompute).empty());
    static_cast<char*>(rig.cache->slot_address(1))[256 + 255] ^= 1;
    static_cast<char*>(rig.cache->slot_address(1))[110] ^= 1;  // padding behind part 0: no part's byte
    static_cast<char*>(rig.cache->slot_address(3))[0] ^= 1;    // an empty slot
    const auto wrong = rig.cache->verify(kCompute);
    REQUIRE(wrong.size() == 1);
    CHECK(wrong[0].slot == 1);
    CHECK(wrong[0].entry == 1);
    CHECK(wrong[0].part == 1);
}

TEST_CASE("heat learned in one process warms the next") {
    Rig first(2, 8, 4), second(2, 8, 4);
    for (int i = 0; i < 20; ++i) {
        first.step(0, {2, 3});
        first.step(1, {6});
    }
    second.cache->import_heat(first.cache->export_heat());
    CHECK(second.cache->export_heat() == first.cache->export_heat());
    CHECK(second.cache->refill(4, kCopy, kCompute) == 3);
    CHECK(second.cache->poll() == 0);
    CHECK(second.step(0, {2, 3}).hits == 2);
    CHECK(second.step(1, {6}).hits == 1);
    CHECK_THROWS_AS(second.cache->import_heat(std::vector<std::uint16_t>(3)), std::invalid_argument);
}

TEST_CASE("the policy state travels to a device block and back") {
    Rig rig(2, 8, 4);
    rig.step(0, {1, 2});
    rig.cache->upload(kCompute);
    // What a kernel does on the device: the same step on the block there.
    const ClockView there = clock_view(rig.cache->device_block(), rig.cache->clock());
    ClockStep out;
    ClockScratch scratch;
    const std::int64_t picks[] = {1, 5};
    clock_step(there, 0, picks, 2, 1, 8, out, scratch, SerialLanes{});
    CHECK(out.hits == 1);
    CHECK(rig.cache->slot_of(0, 5) == -1);
    rig.cache->download(kCompute);
    CHECK(rig.cache->slot_of(0, 5) == out.slot[1]);
    CHECK(rig.cache->stats().counters.hits == 1);
}

TEST_CASE("settings that cannot work and memory that is not there are refused, leaving nothing allocated") {
    Rig rig(1, 8, 4);
    ExpertCacheConfig bad = rig.config;
    bad.clock.window = 1000;
    CHECK_THROWS_WITH_AS(ExpertCache(rig.device, bad, rig.homes()), "ExpertCache: window must be 1..128",
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(ExpertCache(rig.device, rig.config, {}), doctest::Contains("0 home addresses, 24 needed"),
                         std::invalid_argument);
    const auto small = make_host_device(3000);
    bad = rig.config;
    bad.segment_slots = 2;  // two segments of 1,536 bytes
    CHECK_THROWS_AS(ExpertCache(small, bad, rig.homes()), DeviceFailure);
    CHECK(small->allocated_bytes() == 0);
    ClockConfig knobs = rig.cache->clock();
    knobs.max_admissions = 0;
    knobs.slots = 99;  // sizes stay
    rig.cache->set_knobs(knobs);
    CHECK(rig.cache->clock().slots == 4);
    CHECK(rig.step(0, {0}).admitted == 0);
    knobs.margin = -1;
    CHECK_THROWS_AS(rig.cache->set_knobs(knobs), std::invalid_argument);
}

TEST_CASE("2,000 steps of churn with loans, refills and held copies: every read equals home") {
    RoutingSpec spec{.layers = 4, .experts = 40, .k = 4, .rows = 2, .steps = 500};
    spec.topic_steps = 60;
    spec.topic_deviation = 2.0;
    const auto trace = make_routing(spec);
    Rig rig(4, 40, 30, 8);
    rig.device->defer(true);
    std::mt19937 random(5);
    std::vector<std::int32_t> dropped;
    bool lent[4] = {};
    for (std::size_t i = 0; i < trace.size(); ++i) {
        const int layer = static_cast<int>(i % 4);
        rig.cache->poll();
        rig.cache->step(layer, trace[i], spec.rows, kClockMaxPicks, kCompute);
        // The layer's kernels: they read every picked expert when the stream gets there.
        std::vector<std::vector<char>> read(trace[i].size(), std::vector<char>(100));
        for (std::size_t p = 0; p < trace[i].size(); ++p) {
            rig.device->copy_async(read[p].data(), rig.cache->address(layer, static_cast<int>(trace[i][p]), 0), 100,
                                   kCompute);
        }
        for (unsigned n = random() % 12; n > 0; --n) rig.device->step(kCopy);
        rig.device->stream_synchronize(kCompute);
        for (std::size_t p = 0; p < trace[i].size(); ++p) {
            CHECK(read[p] ==
                  rig.bytes[(static_cast<std::size_t>(layer) * 40 + static_cast<std::size_t>(trace[i][p])) * 3]);
        }
        const int segment = static_cast<int>(random() % 4);
        if (random() % 40 == 0) {
            if (lent[segment]) {
                CHECK(rig.cache->take_back(segment));
            } else {
                void* memory = rig.cache->lend(segment, random() % 2, dropped);
                if (memory) std::memset(memory, 0xee, rig.cache->segment_slots(segment) * rig.cache->slot_bytes());
            }
            lent[segment] = !lent[segment];
        }
        rig.cache->refill(static_cast<int>(random() % 3), kCopy, kCompute);
        if (i % 100 == 99) CHECK(rig.cache->verify(kCompute).empty());
    }
    const ExpertCacheStats stats = rig.cache->stats();
    MESSAGE("admissions ", stats.counters.admissions, ", refills ", stats.counters.refills, ", evictions ",
            stats.counters.evictions, ", hits ", stats.counters.hits, ", misses ", stats.counters.misses);
    CHECK(stats.counters.admissions > 200);
    CHECK(stats.counters.refills > 20);
    CHECK(stats.resident + stats.loading + stats.empty + stats.lent == stats.slots);
}
