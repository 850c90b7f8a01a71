#include "cpu/moe_plan.h"

#include "cpu/kernels.h"

namespace glm53::cpu {
namespace {

// Work below this is not worth waking another thread for.
constexpr uint64_t kBytesPerThread = 64 * 1024;
// Decoding a tile costs about four times what one more row of activations adds.
constexpr int64_t kDecodeCost = 4;

// What the activations of a wave may take: they should stay in the caches.
constexpr int64_t kWaveBytes = 1 << 20;

int64_t unit_cost(int rows) {
    return kDecodeCost + rows;
}

}  // namespace

int MoePlan::workers(int threads) const {
    return static_cast<int>(std::clamp<uint64_t>(bytes_ / kBytesPerThread, 1, static_cast<uint64_t>(threads)));
}

int MoePlan::wave_slots(const ExpertTable& table) {
    const int64_t slot_bytes = 8 * int64_t{table.hidden()} + 10 * int64_t{table.intermediate()};
    return static_cast<int>(std::max<int64_t>(kLeastWaveSlots, kWaveBytes / slot_bytes));
}

// Groups of at most kMaxRows picks, as equal as can be, and waves of as many groups as fit.
void MoePlan::group(const ExpertTable& table) {
    groups_.clear();
    waves_.clear();
    order_.clear();
    bytes_ = 0;
    int64_t cost = 0;
    const int most = wave_slots(table);
    const auto expert_at = [&](size_t i) { return static_cast<int>(keys_[i] >> 32); };
    for (size_t begin = 0, end = 0; begin < keys_.size(); begin = end) {
        const int expert = expert_at(begin);
        while (end < keys_.size() && expert_at(end) == expert) ++end;
        const auto count = static_cast<int64_t>(end - begin);
        const int64_t parts = (count + kMaxRows - 1) / kMaxRows;
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t first = count * part / parts;
            const int rows = static_cast<int>(count * (part + 1) / parts - first);
            const int64_t slot = static_cast<int64_t>(begin) + first;
            if (waves_.empty() || waves_.back().slots + rows > most) {
                const int at = static_cast<int>(groups_.size());
                waves_.push_back({at, at, slot, 0, 0});
            }
            Wave& wave = waves_.back();
            ++wave.end;
            wave.slots += rows;
            wave.cost += unit_cost(rows);
            groups_.push_back({expert, rows, slot, cost});
            cost += unit_cost(rows);
            bytes_ += table[expert].trellis_bytes;
        }
    }
    for (const uint64_t key : keys_) order_.push_back(static_cast<int64_t>(key & 0xffffffff));
}

// Rounds of one share a worker, each three quarters of what is left.
MoePlan::Range MoePlan::share(const Wave& wave, int units, int64_t ticket, int workers) {
    const int64_t total = wave.cost * units;
    if (workers == 1) return ticket == 0 ? Range{0, total} : Range{total, total};
    const int64_t least = unit_cost(1);
    for (int64_t begin = 0; begin < total;) {
        const int64_t size = std::max(least, (total - begin) * 3 / (4 * workers));
        if (ticket < workers) {
            begin = std::min(begin + ticket * size, total);
            return {begin, std::min(begin + size, total)};
        }
        ticket -= workers;
        begin += workers * size;
    }
    return {total, total};
}

MoePlan::Range MoePlan::units(const Wave& wave, const Group& group, int units, Range share) const {
    const int64_t cost = unit_cost(group.rows);
    const int64_t base = (group.cost_begin - groups_[static_cast<size_t>(wave.begin)].cost_begin) * units;
    const auto first_at = [&](int64_t position) {  // the first unit that begins at or after a position
        return position <= base ? int64_t{0} : std::min((position - base + cost - 1) / cost, int64_t{units});
    };
    return {first_at(share.begin), first_at(share.end)};
}

}  // namespace glm53::cpu
