// MoePlan: one call's picks grouped by expert, and the order in which units of work are shared out.
//
// The unit is (expert, up to 8 rows, 128 intermediate channels). Units lie in one line, by group and then by slice;
// each worker takes one contiguous run of about equal cost, so that it touches few experts.
//
// States: what the last build() made; vectors keep their room. Threads: none inside; a plan is read by any number of
// threads after build(). Costs: one counting sort of the picks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/expert_table.h"
#include "cpu/kernels.h"

namespace glm53::cpu {

inline constexpr int kSkippedPick = -1;  // a pick that another lane serves: it adds nothing here

class MoePlan {
  public:
    // Up to kMaxRows picks of one expert: slots [first, first + rows) of the order.
    struct Group {
        int expert;
        int rows;
        int64_t first;
        int64_t cost_begin;  // units before this group, weighted
    };
    struct Slices {
        int begin, end;
    };

    // picks: (count) expert numbers of complete experts, or kSkippedPick.
    template <class Pick>
    void build(const ExpertTable& table, const Pick* picks, int64_t count);

    const std::vector<Group>& groups() const { return groups_; }
    // Index of the pick in each slot, by expert, then as picked.
    const std::vector<int64_t>& order() const { return order_; }
    uint64_t bytes() const { return bytes_; }  // trellis bytes that the groups decode
    int workers(int threads) const;            // as many as the work is worth sharing among
    // The slices of `group` that worker `worker` of `active` takes: those whose cost begins in its share of the total.
    Slices slices(const Group& group, int worker, int active) const;

  private:
    void group(const ExpertTable& table);

    std::vector<Group> groups_;
    std::vector<int64_t> order_, starts_;
    int64_t slices_ = 0;  // of an expert
    int64_t total_cost_ = 0;
    uint64_t bytes_ = 0;
};

template <class Pick>
void MoePlan::build(const ExpertTable& table, const Pick* picks, int64_t count) {
    static_assert(std::is_signed_v<Pick>);
    starts_.assign(static_cast<size_t>(table.experts()) + 1, 0);
    for (int64_t i = 0; i < count; ++i) {
        if (picks[i] != kSkippedPick) ++starts_[static_cast<size_t>(picks[i]) + 1];
    }
    for (size_t e = 1; e < starts_.size(); ++e) starts_[e] += starts_[e - 1];
    group(table);
    order_.resize(static_cast<size_t>(starts_.back()));
    for (int64_t i = 0; i < count; ++i) {
        if (picks[i] != kSkippedPick) order_[static_cast<size_t>(starts_[static_cast<size_t>(picks[i])]++)] = i;
    }
}

}  // namespace glm53::cpu
