// MoePlan: one call's picks grouped by expert, and how their columns are shared out.
//
// A group is up to 8 picks of one expert, decoded once for all of them. Groups are computed in waves of as many as the
// scratch has slots for. A wave has two lines of work, whose unit is a pair of tile columns over all of k (two tiles of
// 3 bits are three cache lines): gate, then up, of each group; and down of each group. Both are cut into shares that
// whoever is free takes next: first a long run of columns each, for memory is read best in long runs, then ever shorter
// ones, so that nobody waits long for the slowest.
//
// States: what the last build() made; vectors keep their room. Threads: none inside; a plan is read by any number of
// threads after build(). Costs: one sort of the picks; the same picks give the same plan, so threads may each make it.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/expert_table.h"
#include "cpu/lane_block.h"

namespace glm53::cpu {

inline constexpr int kLeastWaveSlots = 128;  // picks that always fit one wave
inline constexpr int kPairColumns = 32;      // channels of a unit

class MoePlan {
  public:
    // Up to kMaxRows picks of one expert: slots [first, first + rows) of the order.
    struct Group {
        int expert;
        int rows;
        int64_t first;
        int64_t cost_begin;  // of one unit of every group before it
    };
    // Groups [begin, end), slots [first, first + slots).
    struct Wave {
        int begin, end;
        int64_t first;
        int slots;
        int64_t cost;  // of one unit of each of its groups
    };
    struct Range {
        int64_t begin, end;
    };

    // picks: (count) expert numbers of complete experts, or kSkippedPick.
    template <class Pick>
    void build(const ExpertTable& table, const Pick* picks, int64_t count);

    const std::vector<Group>& groups() const { return groups_; }
    const std::vector<Wave>& waves() const { return waves_; }
    // Index of the pick in each slot, by expert, then as picked.
    const std::vector<int64_t>& order() const { return order_; }
    uint64_t bytes() const { return bytes_; }         // trellis bytes that the groups decode
    static int wave_slots(const ExpertTable& table);  // picks of a wave at most
    int workers(int threads) const;                   // as many as the work is worth sharing among

    // Share `ticket` of a wave whose groups have `units` units each, in units of cost; empty behind the last one.
    static Range share(const Wave& wave, int units, int64_t ticket, int workers);
    // Which of a group's units begin in a share.
    Range units(const Wave& wave, const Group& group, int units, Range share) const;

  private:
    void group(const ExpertTable& table);

    std::vector<Group> groups_;
    std::vector<Wave> waves_;
    std::vector<uint64_t> keys_;  // expert << 32 | index of the pick
    std::vector<int64_t> order_;
    uint64_t bytes_ = 0;
};

template <class Pick>
void MoePlan::build(const ExpertTable& table, const Pick* picks, int64_t count) {
    static_assert(std::is_signed_v<Pick>);
    keys_.clear();
    for (int64_t i = 0; i < count; ++i) {
        if (picks[i] == kSkippedPick) continue;
        keys_.push_back(static_cast<uint64_t>(picks[i]) << 32 | static_cast<uint64_t>(i));
    }
    std::sort(keys_.begin(), keys_.end());
    group(table);
}

}  // namespace glm53::cpu
