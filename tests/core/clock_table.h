// A CLOCK policy's table in host memory, to be stepped and looked into.
#pragma once
#include <doctest/doctest.h>

#include <cstdint>
#include <set>
#include <vector>

#include "cache/clock.h"
#include "cache/clock_admin.h"

namespace glm53::test {

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

}  // namespace glm53::test
