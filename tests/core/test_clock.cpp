// The CLOCK policy by exact survivors in small tables.
#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "clock_table.h"

using namespace glm53;
using namespace glm53::test;

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
