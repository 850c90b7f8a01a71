#include "cache/clock_plan.h"

#include <algorithm>
#include <cstddef>

#include "cache/clock.h"

namespace glm53 {

std::vector<std::int32_t> clock_hottest_missing(const ClockView& view, int count) {
    const ClockConfig& c = view.header->config;
    std::vector<bool> taken(static_cast<std::size_t>(c.layers) * c.experts);
    for (int slot = 0; slot < c.slots; ++slot) {  // residents and loads alike
        const int owner = slot_owner(view.slot_word[slot]);
        if (owner >= 0) taken[owner] = true;
    }
    std::vector<std::int32_t> plan;
    for (std::size_t entry = 0; entry < taken.size(); ++entry) {
        if (!taken[entry] && view.heat[entry] != 0) plan.push_back(static_cast<std::int32_t>(entry));
    }
    const auto hotter = [&](std::int32_t a, std::int32_t b) {
        const std::uint32_t heat_a = clock_score(c, view.heat[a]), heat_b = clock_score(c, view.heat[b]);
        return heat_a != heat_b ? heat_a > heat_b : a < b;
    };
    const std::size_t kept = std::min(plan.size(), static_cast<std::size_t>(std::max(count, 0)));
    std::partial_sort(plan.begin(), plan.begin() + static_cast<std::ptrdiff_t>(kept), plan.end(), hotter);
    plan.resize(kept);
    return plan;
}

}  // namespace glm53
