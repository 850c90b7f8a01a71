// The plan of a call: every pick in one slot, every unit of every group in one share, whatever the workers.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/moe_plan.h"
#include "small_experts.h"

using namespace glm53;
using namespace glm53::test;
using cpu::MoePlan;

TEST_CASE("groups and waves hold every pick once, by expert, then as picked") {
    const Layer layer(4, 3);
    std::mt19937 random(5);
    MoePlan plan;
    for (const int count : {0, 1, 7, 300, 4000}) {
        std::vector<int64_t> picks;
        for (int i = 0; i < count; ++i) picks.push_back(random() % 5 ? random() % 4 : cpu::kSkippedPick);
        plan.build(layer.table, picks.data(), count);
        CHECK(std::ssize(plan.order()) == count - std::count(picks.begin(), picks.end(), cpu::kSkippedPick));
        int64_t slot = 0;
        int group = 0;
        for (const MoePlan::Wave& wave : plan.waves()) {
            CHECK(wave.begin == group);
            CHECK(wave.first == slot);
            CHECK(wave.slots <= MoePlan::wave_slots(layer.table));
            for (; group < wave.end; ++group) {
                const MoePlan::Group& g = plan.groups()[static_cast<size_t>(group)];
                CHECK(g.first == slot);
                CHECK((g.rows >= 1 && g.rows <= cpu::kMaxRows));
                for (const int64_t end = slot + g.rows; slot < end; ++slot) {
                    const int64_t pick = plan.order()[static_cast<size_t>(slot)];
                    CHECK(picks[static_cast<size_t>(pick)] == g.expert);
                    const bool same = slot > g.first;
                    CHECK((!same || plan.order()[static_cast<size_t>(slot - 1)] < pick));
                }
            }
            CHECK(slot == wave.first + wave.slots);
        }
        CHECK((count < 4000 || std::ssize(plan.waves()) > 2));
        CHECK(slot == std::ssize(plan.order()));
        CHECK(group == std::ssize(plan.groups()));
    }
}

TEST_CASE("shares: every unit once, in order, long runs first, for any number of workers") {
    const Layer layer(4, 3);
    std::mt19937 random(6);
    MoePlan plan;
    for (const int count : {1, 2, 8, 60, 900}) {
        std::vector<int64_t> picks;
        for (int i = 0; i < count; ++i) picks.push_back(random() % 4);
        plan.build(layer.table, picks.data(), count);
        for (const int workers : {1, 2, 3, 14, 64}) {
            for (const int units : {4, 8, 128}) {
                for (const MoePlan::Wave& wave : plan.waves()) {
                    std::vector<int64_t> next(static_cast<size_t>(wave.end - wave.begin));
                    int64_t position = 0, longest = wave.cost * units;
                    for (int64_t ticket = 0;; ++ticket) {
                        const MoePlan::Range share = MoePlan::share(wave, units, ticket, workers);
                        if (share.begin == share.end) break;
                        CHECK(share.begin == position);
                        CHECK(share.end - share.begin <= longest);
                        if (share.end < wave.cost * units) longest = share.end - share.begin;
                        position = share.end;
                        for (int g = wave.begin; g < wave.end; ++g) {
                            const auto range = plan.units(wave, plan.groups()[static_cast<size_t>(g)], units, share);
                            if (range.begin == range.end) continue;
                            CHECK(range.begin == next[static_cast<size_t>(g - wave.begin)]);
                            next[static_cast<size_t>(g - wave.begin)] = range.end;
                        }
                    }
                    CHECK(position == wave.cost * units);
                    CHECK(std::count(next.begin(), next.end(), units) == wave.end - wave.begin);
                }
            }
        }
    }
}
