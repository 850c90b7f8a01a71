// The CLOCK policy by exact survivors in small tables, invariants under random operations, and miss rates on routing
// traces.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "cache/clock.h"
#include "cache/clock_admin.h"
#include "routing_trace.h"

using namespace glm53;

namespace {

// A small table with knobs that make every decision easy to follow: no aging, one heat, margin 0.
struct Table {
    ClockConfig config;
    std::vector<std::uint64_t> block;
    ClockView view{};
    ClockStep out{};
    ClockScratch scratch{};

    explicit Table(ClockConfig c) : config(c), block(clock_bytes(c) / 8 + 1) {
        REQUIRE(clock_config_error(c) == nullptr);
        clock_init(block.data(), c);
        view = clock_view(block.data(), c);
    }
    static Table plain(int layers, int experts, int slots) {
        ClockConfig c;
        c.layers = layers;
        c.experts = experts;
        c.slots = slots;
        c.margin = 0;
        c.ref_max = 1;
        c.gain = 1;
        c.age_rows = 1 << 20;
        c.recent_weight = 0;
        return Table(c);
    }
    const ClockStep& step(int layer, std::vector<std::int64_t> picks, int limit = kClockMaxPicks) {
        clock_step(view, layer, picks.data(), static_cast<int>(picks.size()), 1, limit, out, scratch, SerialLanes{});
        return out;
    }
    // Entry in each slot, -1 empty, -2 lent.
    std::vector<int> slots() const {
        std::vector<int> owners;
        for (int s = 0; s < config.slots; ++s) {
            owners.push_back(view.slot_word[s] & kLentFlag ? -2 : slot_owner(view.slot_word[s]));
        }
        return owners;
    }
    void check_consistent() const {
        std::set<int> free_set(view.free_list, view.free_list + view.header->free_slots);
        CHECK(static_cast<int>(free_set.size()) == view.header->free_slots);
        int lent = 0;
        for (int s = 0; s < config.slots; ++s) {
            const std::uint32_t word = view.slot_word[s];
            const bool is_lent = word & kLentFlag;
            lent += is_lent;
            CHECK((word & kBusyFlag) == 0);
            CHECK(free_set.count(s) == (slot_owner(word) < 0 && !is_lent));
            if (is_lent) CHECK(word == kLentFlag);
        }
        CHECK(lent == view.header->lent_slots);
        for (int e = 0; e < config.layers * config.experts; ++e) {
            if (view.slot_of[e] >= 0) CHECK(slot_owner(view.slot_word[view.slot_of[e]]) == e);
        }
    }
};

using Owners = std::vector<int>;

}  // namespace

TEST_CASE("picks are deduplicated in order of first pick, with rows counted and bad ids ignored") {
    Table t = Table::plain(1, 8, 8);
    const ClockStep& out = t.step(0, {5, 2, 5, -1, 8, 2, 5, 7});
    CHECK(out.picks == 8);
    CHECK(out.unique == 3);
    CHECK(Owners(out.expert, out.expert + 3) == Owners{5, 2, 7});
    CHECK(Owners(out.rows, out.rows + 3) == Owners{3, 2, 1});
    CHECK(Owners(out.unique_of, out.unique_of + 8) == Owners{0, 1, 0, -1, -1, 1, 0, 2});
    CHECK(Owners(t.view.heat, t.view.heat + 8) == Owners{0, 0, 2 | 2 << 16, 0, 0, 3 | 3 << 16, 0, 1 | 1 << 16});
    CHECK(t.step(0, {}).unique == 0);
    CHECK(t.step(0, {-1, 9}).unique == 0);
}

TEST_CASE("empty slots are filled first, then only hotter experts get in: the survivors by name") {
    Table t = Table::plain(1, 10, 3);
    t.step(0, {0, 1});
    CHECK(t.slots() == Owners{0, 1, -1});
    t.step(0, {0, 2});  // 0 is a hit
    CHECK(t.out.hits == 1);
    CHECK(t.slots() == Owners{0, 1, 2});
    t.step(0, {3});  // heat 1 against 1 of the coldest: stays out, and slot 0 loses its reference
    CHECK(t.out.kind[0] == PickKind::Miss);
    CHECK(t.out.slot[0] == -1);
    CHECK(t.slots() == Owners{0, 1, 2});
    t.step(0, {3});  // heat 2: beats expert 1 (heat 1), the first of the coldest from the hand
    CHECK(t.out.kind[0] == PickKind::Admitted);
    CHECK(t.out.slot[0] == 1);
    CHECK(t.out.evicted[0] == 1);
    CHECK(t.slots() == Owners{0, 3, 2});
    CHECK(t.view.slot_of[1] == -1);
    t.step(0, {4});
    t.step(0, {4});
    CHECK(t.slots() == Owners{0, 3, 4});  // expert 2 had heat 1
    t.step(0, {5});
    t.step(0, {5});
    CHECK(t.slots() == Owners{0, 3, 4});  // everyone has 2
    t.step(0, {5});
    CHECK(t.slots() == Owners{5, 3, 4});
    CHECK(t.view.header->counters.evictions == 3);
    CHECK(t.view.header->counters.admissions == 6);
    t.check_consistent();
}

TEST_CASE("slots are one pool: a layer's hot expert takes another layer's cold slot") {
    Table t = Table::plain(2, 4, 2);
    t.step(0, {0, 1});
    t.step(1, {0});
    CHECK(t.slots() == Owners{0, 1});
    t.step(1, {0});
    CHECK(t.slots() == Owners{4, 1});
    CHECK(t.out.evicted[0] == 0);
}

TEST_CASE("victims are never among the current picks, even when those are the coldest") {
    Table t = Table::plain(1, 6, 2);
    t.config.ref_max = 0;
    t.view.header->config.ref_max = 0;
    t.step(0, {0, 1});
    t.view.heat[3] = t.view.heat[4] = heat_pack(100, 0);
    t.step(0, {0, 3, 1, 4});
    CHECK(t.out.hits == 2);
    CHECK(t.out.admitted == 0);
    CHECK(t.slots() == Owners{0, 1});
    t.step(0, {0, 3, 4});
    CHECK(t.out.admitted == 1);
    CHECK(t.slots() == Owners{0, 4 - 1});  // 3 and 4 tie: the earlier pick wins
}

TEST_CASE("the hottest miss meets the coldest victim") {
    Table t = Table::plain(1, 10, 3);
    for (int e = 0; e < 6; ++e) t.view.heat[e] = heat_pack(static_cast<std::uint32_t>(10 * e), 0);
    t.step(0, {0, 1, 2});
    CHECK(t.slots() == Owners{2, 1, 0});  // empty slots go to the hottest first, too
    t.view.heat[7] = heat_pack(15, 0);
    t.step(0, {7, 5, 3});  // heats 16, 51, 31 against 1, 11, 21
    CHECK(t.out.admitted == 2);
    CHECK(t.slots() == Owners{2, 3, 5});  // 16 does not beat 21
    CHECK(t.out.kind[0] == PickKind::Miss);
}

TEST_CASE("a reference protects a slot for as many passes of the hand as it counted hits") {
    Table t = Table::plain(1, 10, 2);
    t.view.header->config.ref_max = 3;
    t.step(0, {0, 1});
    for (int i = 0; i < 3; ++i) t.step(0, {0, 1});
    for (int e = 2; e < 5; ++e) t.view.heat[e] = heat_pack(50, 0);
    for (int pass = 0; pass < 3; ++pass) {
        t.step(0, {2});
        CHECK(t.out.admitted == 0);
    }
    t.step(0, {2});
    CHECK(t.out.admitted == 1);
    CHECK(t.slots() == Owners{2, 1});
}

TEST_CASE("the hand examines `window` slots a step and wraps") {
    Table t = Table::plain(1, 20, 5);
    t.view.header->config.window = 2;
    t.step(0, {0, 1, 2, 3, 4});
    for (int e = 10; e < 14; ++e) t.view.heat[e] = heat_pack(50, 0);
    t.step(0, {10, 11, 12});  // only slots 0 and 1 are in sight
    CHECK(t.out.admitted == 2);
    CHECK(t.slots() == Owners{10, 11, 2, 3, 4});
    CHECK(t.view.header->hand == 2);
    t.step(0, {12});
    CHECK(t.slots() == Owners{10, 11, 12, 3, 4});
    CHECK(t.view.header->hand == 4);
    t.step(0, {13});
    CHECK(t.slots() == Owners{10, 11, 12, 3, 13});
    CHECK(t.view.header->hand == 1);
}

TEST_CASE("all slots pinned: nothing is admitted, and unpinning opens one") {
    Table t = Table::plain(1, 8, 2);
    t.step(0, {0, 1});
    CHECK(clock_pin(t.view, 0));
    CHECK(clock_pin(t.view, 1));
    for (int i = 0; i < 5; ++i) {
        t.step(0, {2});
        CHECK(t.out.admitted == 0);
    }
    CHECK(clock_unpin(t.view, 1));
    t.step(0, {2});
    CHECK(t.slots() == Owners{0, 2});
    CHECK_FALSE(clock_unpin(t.view, 1));
    for (std::uint32_t i = 1; i < kPinMax; ++i) CHECK(clock_pin(t.view, 0));
    CHECK_FALSE(clock_pin(t.view, 0));  // the 6-bit counter is full
    CHECK(slot_owner(t.view.slot_word[0]) == 0);
    CHECK(slot_pins(t.view.slot_word[0]) == kPinMax);
}

TEST_CASE("admission off: by the step's limit or by the config, hits and heat still count") {
    Table t = Table::plain(1, 8, 2);
    t.step(0, {0}, 0);
    CHECK(t.out.admitted == 0);
    CHECK(t.slots() == Owners{-1, -1});
    CHECK(heat_slow(t.view.heat[0]) == 1);
    t.view.header->config.max_admissions = 1;
    t.step(0, {0, 1});
    CHECK(t.out.admitted == 1);
    CHECK(t.slots() == Owners{0, -1});
    t.view.header->config.max_admissions = 0;
    t.step(0, {0, 1});
    CHECK(t.out.hits == 1);
    CHECK(t.out.admitted == 0);
}

TEST_CASE("heat and reference counters saturate without touching their neighbours in the word") {
    Table t = Table::plain(1, 4, 2);
    t.view.header->config.gain = 1000;
    t.view.header->config.ref_max = 15;
    for (int i = 0; i < 100; ++i) t.step(0, {3, 3, 3});
    CHECK(heat_slow(t.view.heat[3]) == kHeatMax);
    CHECK(heat_recent(t.view.heat[3]) == kHeatMax);
    CHECK(slot_ref(t.view.slot_word[0]) == 15);
    CHECK(slot_owner(t.view.slot_word[0]) == 3);
    CHECK(slot_pins(t.view.slot_word[0]) == 0);
    ClockConfig c;
    c.recent_weight = 64;
    CHECK(clock_score(c, t.view.heat[3]) == 65u * kHeatMax);
    CHECK(65u * kHeatMax <= kScoreMax);  // the largest score fits a key
}

TEST_CASE("the largest table works: owners of 20 bits in the last slot") {
    ClockConfig c;
    c.layers = 1023;
    c.experts = 1024;
    c.slots = 2;
    Table t(c);
    t.step(1022, {1023, 1022});
    CHECK(t.slots() == Owners{1022 * 1024 + 1023, 1022 * 1024 + 1022});
    c.experts = 1026;
    CHECK(clock_config_error(c) != nullptr);
}

TEST_CASE("aging follows the layer's rows and brings an unpicked expert to 0") {
    Table t = Table::plain(2, 4, 1);
    ClockConfig& c = t.view.header->config;
    c.age_rows = 4;
    c.slow_shift = 1;
    c.recent_shift = 2;
    t.view.heat[2] = heat_pack(100, 100);
    t.view.heat[6] = heat_pack(100, 100);
    for (int i = 0; i < 3; ++i) t.step(0, {0});
    CHECK(t.view.heat[2] == heat_pack(100, 100));
    t.step(0, {0});
    CHECK(t.view.heat[2] == heat_pack(50, 75));
    CHECK(t.view.heat[6] == heat_pack(100, 100));  // another layer's rows
    for (int i = 0; i < 400; ++i) t.step(0, {0});
    CHECK(t.view.heat[2] == 0);
}

TEST_CASE("a prompt's counts heat as its rows one by one would, in the long run") {
    Table chunk = Table::plain(1, 4, 1), rows = Table::plain(1, 4, 1);
    for (Table* t : {&chunk, &rows}) t->view.header->config = ClockConfig{.layers = 1, .experts = 4, .slots = 1};
    std::mt19937 random(3);
    std::vector<std::int32_t> counts(4);
    for (int r = 0; r < 4000; ++r) {
        std::vector<std::int64_t> picks{0};
        if (random() % 2) picks.push_back(1);
        if (random() % 8 == 0) picks.push_back(2);
        for (const auto e : picks) ++counts[static_cast<std::size_t>(e)];
        rows.step(0, picks, 0);
    }
    clock_note_rows(chunk.view, 0, counts.data(), 4000, SerialLanes{});
    for (int e = 0; e < 4; ++e) {
        const double a = heat_slow(chunk.view.heat[e]), b = heat_slow(rows.view.heat[e]);
        CHECK(a == doctest::Approx(b).epsilon(0.35));
    }
    CHECK(chunk.view.header->counters.steps == 0);
    Table few = Table::plain(1, 4, 1);
    const std::vector<std::int32_t> three{3, 0, 0, 1};
    clock_note_rows(few.view, 0, three.data(), 3, SerialLanes{});
    CHECK(Owners(few.view.heat, few.view.heat + 4) == Owners{3 | 3 << 16, 0, 0, 1 | 1 << 16});
}

TEST_CASE("lending drops entries, keeps the rest, and gives back empty slots") {
    Table t = Table::plain(1, 8, 4);
    t.step(0, {0, 1, 2});
    Owners dropped(4, -9);
    clock_pin(t.view, 1);
    CHECK(clock_lend(t.view, 1, 3, dropped.data()) == -1);  // refused whole
    CHECK(t.slots() == Owners{0, 1, 2, -1});
    clock_unpin(t.view, 1);
    CHECK(clock_lend(t.view, 1, 3, dropped.data()) == 2);
    CHECK(dropped == Owners{1, 2, -9, -9});
    CHECK(t.slots() == Owners{0, -2, -2, -2});
    CHECK(clock_lend(t.view, 3, 1, dropped.data()) == -1);  // lent already
    t.check_consistent();
    for (int i = 0; i < 5; ++i) t.step(0, {3});
    CHECK(t.slots() == Owners{3, -2, -2, -2});  // lent slots are neither filled nor victims
    CHECK(clock_give_back(t.view, 0, 4) == 3);
    CHECK(t.slots() == Owners{3, -1, -1, -1});
    t.check_consistent();
    t.step(0, {0, 1});
    CHECK(t.slots() == Owners{3, 0, 1, -1});
}

TEST_CASE("a loading slot is invisible until published, and gives way to a step that was faster") {
    Table t = Table::plain(1, 8, 2);
    const int slot = clock_reserve(t.view, 5);
    CHECK(slot == 0);
    Owners dropped(2);
    CHECK(clock_lend(t.view, 0, 1, dropped.data()) == -1);
    SUBCASE("published") {
        t.step(0, {5}, 0);
        CHECK(t.out.hits == 0);
        CHECK(clock_publish(t.view, slot) == 5);
        t.step(0, {5});
        CHECK(t.out.hits == 1);
        CHECK(clock_reserve(t.view, 5) == -1);
        CHECK(t.view.header->counters.refills == 1);
    }
    SUBCASE("overtaken") {
        t.step(0, {5});
        CHECK(t.out.slot[0] == 1);
        for (int i = 0; i < 9; ++i) t.step(0, {6});  // beats 5 in slot 1, cannot have the loading slot 0
        CHECK(t.slots() == Owners{5, 6});
        t.step(0, {5, 7}, 0);
        CHECK(clock_reserve(t.view, 7) == -1);  // no empty slot
        SUBCASE("and evicted again") {
            CHECK(clock_publish(t.view, slot) == 5);
        }
        SUBCASE("and still there") {
            for (int i = 0; i < 20; ++i) t.step(0, {5});
            CHECK(t.view.slot_of[5] == 1);
            CHECK(clock_publish(t.view, slot) == -1);
            CHECK(t.slots() == Owners{-1, 5});
        }
    }
    t.check_consistent();
}

TEST_CASE("invariants hold under random steps, pins, loans and loads") {
    std::mt19937 random(11);
    ClockConfig c;
    c.layers = 3;
    c.experts = 20;
    c.slots = 13;
    c.window = 5;
    c.margin = 10;
    Table t(c);
    std::vector<int> pinned, loading;
    Owners dropped(13);
    for (int i = 0; i < 5000; ++i) {
        const int slot = static_cast<int>(random() % 13);
        switch (random() % 8) {
            case 0:
                if (slot_owner(t.view.slot_word[slot]) >= 0 && clock_pin(t.view, slot)) pinned.push_back(slot);
                break;
            case 1:
                if (!pinned.empty()) {
                    CHECK(clock_unpin(t.view, pinned.back()));
                    pinned.pop_back();
                }
                break;
            case 2:
                clock_lend(t.view, slot, std::min(3, 13 - slot), dropped.data());
                break;
            case 3:
                clock_give_back(t.view, slot, std::min(5, 13 - slot));
                break;
            case 4:
                if (loading.size() < 3) {
                    const int s = clock_reserve(t.view, static_cast<int>(random() % 60));
                    if (s >= 0) loading.push_back(s);
                } else {
                    const int s = loading.back();
                    loading.pop_back();
                    if (std::find(pinned.begin(), pinned.end(), s) == pinned.end()) clock_publish(t.view, s);
                }
                break;
            default: {
                std::vector<std::int64_t> picks;
                for (int p = 0; p < 6; ++p) picks.push_back(static_cast<std::int64_t>(random() % 22) - 1);
                t.step(static_cast<int>(random() % 3), picks);
                int admitted = 0;
                for (int u = 0; u < t.out.unique; ++u) {
                    admitted += t.out.kind[u] == PickKind::Admitted;
                    const int now = t.view.slot_of[t.out.layer * 20 + t.out.expert[u]];
                    CHECK(now == t.out.slot[u]);
                    CHECK((now < 0) == (t.out.kind[u] == PickKind::Miss));
                }
                CHECK(admitted == t.out.admitted);
            }
        }
        t.check_consistent();
    }
    CHECK(t.view.header->counters.admissions > 100);
}

namespace {
struct Rates {
    double misses = 0, admitted = 0;  // per layer and step, from step `from` on
};
Rates replay(const std::vector<std::vector<std::int64_t>>& trace, const RoutingSpec& spec, int slots, int from) {
    Table t(ClockConfig{.layers = spec.layers, .experts = spec.experts, .slots = slots});
    Rates rates;
    for (std::size_t i = 0; i < trace.size(); ++i) {
        const int layer = static_cast<int>(i % static_cast<std::size_t>(spec.layers));
        clock_step(t.view, layer, trace[i].data(), static_cast<int>(trace[i].size()), spec.rows, kClockMaxPicks, t.out,
                   t.scratch, SerialLanes{});
        if (static_cast<int>(i) / spec.layers < from) continue;
        rates.misses += t.out.unique - t.out.hits;
        rates.admitted += t.out.admitted;
    }
    const double steps = static_cast<double>(spec.layers) * (spec.steps - from);
    return {rates.misses / steps, rates.admitted / steps};
}
}  // namespace

TEST_CASE("on independent Zipf routing misses stay within 1.15x of the hottest 31 experts a layer, held fixed") {
    RoutingSpec spec;
    SUBCASE("1 row") {
        spec.rows = 1;
    }
    SUBCASE("4 rows") {
        spec.rows = 4;
        spec.steps = 500;
    }
    const int from = spec.steps / 3;
    const auto trace = make_routing(spec);
    const double fixed = hottest_fixed_misses(trace, spec, 31, from);
    const Rates rates = replay(trace, spec, 248, from);
    MESSAGE("misses ", rates.misses, ", fixed ", fixed, ", ratio ", rates.misses / fixed, ", admitted ",
            rates.admitted);
    CHECK(fixed > (spec.rows == 1 ? 4.8 : 18.0));  // the trace is as hard as the measured model's routing
    CHECK(rates.misses <= 1.15 * fixed);
    CHECK(rates.admitted <= 0.1 * rates.misses);  // no churn
}

TEST_CASE("when topics change the policy follows: fewer misses than any fixed set") {
    RoutingSpec spec;
    spec.exponent = 0.5;
    spec.topic_steps = 400;
    spec.topic_deviation = 1.0;
    spec.steps = 2000;
    const auto trace = make_routing(spec);
    const double fixed = hottest_fixed_misses(trace, spec, 31, 400);
    const Rates rates = replay(trace, spec, 248, 400);
    MESSAGE("misses ", rates.misses, ", fixed ", fixed, ", admitted ", rates.admitted);
    CHECK(rates.misses <= 0.95 * fixed);
}
