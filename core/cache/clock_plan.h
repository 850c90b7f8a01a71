// Which experts that no slot has would be worth one, over the whole state where a step sees its picks only. On the
// host, between forward passes. Costs O(entries + slots), 20 us for 42 x 288 entries.
#pragma once
#include <cstdint>
#include <vector>

#include "cache/clock_state.h"

namespace glm53 {

// The hottest entries that no slot has or is being filled with, at most `count`, hottest first; entries never picked do
// not count.
std::vector<std::int32_t> clock_hottest_missing(const ClockView& view, int count);

}  // namespace glm53
