#include "cpu/moe_plan.h"

namespace glm53::cpu {
namespace {

// Work below this is not worth waking another thread for.
constexpr uint64_t kBytesPerThread = 64 * 1024;
// Decoding a tile costs about four times what one more row of activations adds.
constexpr int64_t kDecodeCost = 4;

int64_t unit_cost(int rows) {
    return kDecodeCost + rows;
}

}  // namespace

int MoePlan::workers(int threads) const {
    return static_cast<int>(std::clamp<uint64_t>(bytes_ / kBytesPerThread, 1, static_cast<uint64_t>(threads)));
}

// Groups of at most kMaxRows picks, as equal as can be.
void MoePlan::group(const ExpertTable& table) {
    groups_.clear();
    total_cost_ = 0;
    bytes_ = 0;
    slices_ = table.intermediate() / kBlock;
    for (int e = 0; e < table.experts(); ++e) {
        const int64_t begin = starts_[static_cast<size_t>(e)];
        const int64_t count = starts_[static_cast<size_t>(e) + 1] - begin;
        const int64_t parts = (count + kMaxRows - 1) / kMaxRows;
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t first = begin + count * part / parts;
            const int rows = static_cast<int>(begin + count * (part + 1) / parts - first);
            groups_.push_back({e, rows, first, total_cost_});
            total_cost_ += unit_cost(rows) * slices_;
            bytes_ += table[e].trellis_bytes;
        }
    }
}

MoePlan::Slices MoePlan::slices(const Group& group, int worker, int active) const {
    const int64_t cost = unit_cost(group.rows);
    const auto first_at = [&](int64_t position) {  // the first slice that begins at or after a position
        if (position <= group.cost_begin) return int64_t{0};
        return std::min((position - group.cost_begin + cost - 1) / cost, slices_);
    };
    return {static_cast<int>(first_at(total_cost_ * worker / active)),
            static_cast<int>(first_at(total_cost_ * (worker + 1) / active))};
}

}  // namespace glm53::cpu
