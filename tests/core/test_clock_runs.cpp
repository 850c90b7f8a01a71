// The CLOCK policy over many steps: its invariants under random operations, and miss rates on routing traces.
#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "clock_table.h"
#include "routing_trace.h"

using namespace glm53;
using namespace glm53::test;

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
