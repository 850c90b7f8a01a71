// One step of the expert cache's policy for one layer, on integers only: which picks are hits, which misses are
// admitted into whose slot. The same code runs on one host thread (SerialLanes) and on one CUDA warp (WarpLanes), with
// equal results: lanes share the loops, and every choice is a minimum over keys that are all different.
//
// Policy   CLOCK with frequency-aware admission. Each layer's step examines `window` slots from the hand: a slot whose
//          reference counter is above 0 loses one and is passed over; the others are candidates, the coldest (by heat)
//          first. A missed expert, hottest first, takes an empty slot if there is one; else it must beat the coldest
//          candidate's heat by more than `margin`, so that routing without locality causes no churn. All layers' heat
//          has one unit (picks per row, aged per row of its layer), so experts of different layers compete fairly.
// Not victims  slots of the current picks, pinned, lent or loading ones, those outside the window.
// Bad at   an expert whose picks come in bursts that `margin` outlasts; a lone cold slot of a large pool, which is seen
//          only when the hand comes by (slots / window steps).
// Costs    one warp: dedup n^2 / 32 compares, one slot and one heat load a lane, two reductions an admission; every
//          age_rows rows experts / 32 heat updates a lane.
#pragma once
#include "cache/clock_state.h"

namespace glm53 {

enum class PickKind : std::int32_t { Miss = 0, Hit = 1, Admitted = 2 };

// What a step decided; `unique` experts in the order of their first pick. Miss: read at home. Hit: in `slot`. Admitted:
// to be copied into `slot` before use, and `evicted` (an entry of any layer, or -1) goes back to its home address
// first.
struct ClockStep {
    std::int32_t layer, picks, unique, hits, admitted, reserved[3];
    std::int32_t expert[kClockMaxPicks];
    std::int32_t rows[kClockMaxPicks];  // picks of that expert in this step
    PickKind kind[kClockMaxPicks];
    std::int32_t slot[kClockMaxPicks];       // -1 for Miss
    std::int32_t evicted[kClockMaxPicks];    // -1 but for Admitted into a slot that was taken
    std::int32_t unique_of[kClockMaxPicks];  // pick -> index into the arrays above; -1 for a pick out of range
};

// Working room of a step: shared memory on the device.
struct ClockScratch {
    std::int32_t first[kClockMaxPicks];         // index of the first equal pick, -1 out of range
    std::uint32_t miss_key[kClockMaxPicks];     // ~(heat << 8) | index: smallest is the hottest
    std::uint32_t victim_key[kClockMaxWindow];  // (heat << 8) | window position
    std::int32_t victim_slot[kClockMaxWindow];
};

inline constexpr std::uint32_t kNoKey = 0xffffffffu;
inline constexpr std::uint32_t kScoreMax = (1u << 24) - 2;  // 24 bits beside 8 of index, and kNoKey stays apart
static_assert(kClockMaxPicks <= 256 && kClockMaxWindow <= 256, "indices have 8 bits in a key");

struct SerialLanes {
    GLM53_HD int lane() const { return 0; }
    GLM53_HD int width() const { return 1; }
    GLM53_HD void sync() const {}
    GLM53_HD std::uint32_t min(std::uint32_t v) const { return v; }
};

#if defined(__CUDACC__)
struct WarpLanes {  // all 32 lanes of one warp, converged; needs sm_80
    GLM53_HD int lane() const {
#if defined(__CUDA_ARCH__)
        return static_cast<int>(threadIdx.x & 31u);
#else
        return 0;
#endif
    }
    GLM53_HD int width() const { return 32; }
    GLM53_HD void sync() const {
#if defined(__CUDA_ARCH__)
        __syncwarp();
#endif
    }
    GLM53_HD std::uint32_t min(std::uint32_t v) const {
#if defined(__CUDA_ARCH__)
        return __reduce_min_sync(0xffffffffu, v);
#else
        return v;
#endif
    }
};
#endif

GLM53_HD std::uint32_t clock_score(const ClockConfig& c, std::uint32_t heat) {
    const std::uint32_t score = heat_slow(heat) + static_cast<std::uint32_t>(c.recent_weight) * heat_recent(heat);
    return score > kScoreMax ? kScoreMax : score;
}

// One aging of one heat word; rounds up, so that an expert that is never picked reaches 0.
GLM53_HD std::uint32_t clock_age(const ClockConfig& c, std::uint32_t heat) {
    const std::uint32_t slow = heat_slow(heat), recent = heat_recent(heat);
    return heat_pack(slow - ((slow + (1u << c.slow_shift) - 1) >> c.slow_shift),
                     recent - ((recent + (1u << c.recent_shift) - 1) >> c.recent_shift));
}

// Fills out.expert, rows, unique_of, unique.
template <class Pick, class Lanes>
GLM53_HD void clock_dedup(int experts, const Pick* picks, int n, ClockStep& out, ClockScratch& s, const Lanes& lanes) {
    for (int i = lanes.lane(); i < n; i += lanes.width()) {
        int first = i;
        for (int j = i - 1; j >= 0; --j) first = picks[j] == picks[i] ? j : first;
        s.first[i] = picks[i] >= 0 && picks[i] < experts ? first : -1;
    }
    lanes.sync();
    int unique = 0;
    for (int i = 0; i < n; ++i) unique += s.first[i] == i;
    for (int i = lanes.lane(); i < n; i += lanes.width()) {
        int rank = 0, rows = 0;
        for (int j = 0; j < s.first[i]; ++j) rank += s.first[j] == j;
        out.unique_of[i] = s.first[i] < 0 ? -1 : rank;
        if (s.first[i] != i) continue;
        for (int j = i; j < n; ++j) rows += s.first[j] == i;
        out.expert[rank] = static_cast<std::int32_t>(picks[i]);
        out.rows[rank] = rows;
    }
    if (lanes.lane() == 0) {
        out.picks = n;
        out.unique = unique;
    }
    lanes.sync();
}

// Ages the layer's heat for `rows` more rows.
template <class Lanes>
GLM53_HD void clock_advance(const ClockView& v, const ClockConfig& c, int layer, int rows, const Lanes& lanes) {
    const int count = v.row_count[layer] + rows;
    lanes.sync();
    if (lanes.lane() == 0) v.row_count[layer] = count % c.age_rows;
    std::uint32_t* heat = v.heat + static_cast<std::size_t>(layer) * c.experts;
    for (int ages = count / c.age_rows; ages > 0; --ages) {
        for (int e = lanes.lane(); e < c.experts; e += lanes.width()) heat[e] = clock_age(c, heat[e]);
    }
    lanes.sync();
}

// Heats the picks and tells hits from misses; marks the hits' slots busy. Fills kind, slot, evicted, hits.
template <class Lanes>
GLM53_HD void clock_classify(const ClockView& v, const ClockConfig& c, ClockStep& out, ClockScratch& s,
                             const Lanes& lanes) {
    for (int u = lanes.lane(); u < out.unique; u += lanes.width()) {
        const std::size_t entry = static_cast<std::size_t>(out.layer) * c.experts + out.expert[u];
        const std::uint32_t add = static_cast<std::uint32_t>(c.gain * out.rows[u]);
        const std::uint32_t heat = heat_pack(heat_slow(v.heat[entry]) + add, heat_recent(v.heat[entry]) + add);
        v.heat[entry] = heat;
        const int slot = v.slot_of[entry];
        out.slot[u] = slot;
        out.evicted[u] = -1;
        out.kind[u] = slot >= 0 ? PickKind::Hit : PickKind::Miss;
        s.miss_key[u] = slot >= 0 ? kNoKey : ((kScoreMax - clock_score(c, heat)) << 8 | static_cast<std::uint32_t>(u));
        if (slot < 0) continue;
        const std::uint32_t word = v.slot_word[slot];
        v.slot_word[slot] =
            (slot_ref(word) < static_cast<std::uint32_t>(c.ref_max) ? word + kRefOne : word) | kBusyFlag;
    }
    lanes.sync();
    int hits = 0;
    for (int u = 0; u < out.unique; ++u) hits += s.miss_key[u] == kNoKey;
    if (lanes.lane() == 0) {
        out.hits = hits;
        out.admitted = 0;
    }
    lanes.sync();
}

// Moves the hand over `window` slots and keys the victims among them.
template <class Lanes>
GLM53_HD void clock_scan(const ClockView& v, const ClockConfig& c, ClockScratch& s, int window, const Lanes& lanes) {
    const int hand = v.header->hand;
    for (int w = lanes.lane(); w < window; w += lanes.width()) {
        const int slot = hand + w < c.slots ? hand + w : hand + w - c.slots;
        const std::uint32_t word = v.slot_word[slot];
        s.victim_slot[w] = slot;
        s.victim_key[w] = kNoKey;
        if ((word & kBusyFlag) || slot_pins(word) || slot_owner(word) < 0) continue;  // no owner: empty or lent
        if (slot_ref(word)) {
            v.slot_word[slot] = word - kRefOne;
        } else {
            s.victim_key[w] = clock_score(c, v.heat[slot_owner(word)]) << 8 | static_cast<std::uint32_t>(w);
        }
    }
    lanes.sync();
    if (lanes.lane() == 0) v.header->hand = (hand + window) % c.slots;
    lanes.sync();
}

template <class Lanes>
GLM53_HD std::uint32_t clock_smallest(const std::uint32_t* keys, int n, const Lanes& lanes) {
    std::uint32_t best = kNoKey;
    for (int i = lanes.lane(); i < n; i += lanes.width()) best = keys[i] < best ? keys[i] : best;
    return lanes.min(best);
}

// Pairs the hottest misses with empty slots, then with the coldest victims, until one does not beat its victim.
template <class Lanes>
GLM53_HD void clock_admit(const ClockView& v, const ClockConfig& c, ClockStep& out, ClockScratch& s, int limit,
                          const Lanes& lanes) {
    const int free_slots = v.header->free_slots;
    const int window = c.window < c.slots ? c.window : c.slots;
    lanes.sync();
    if (free_slots < limit) clock_scan(v, c, s, window, lanes);
    for (int a = 0; a < limit; ++a) {
        const std::uint32_t miss = clock_smallest(s.miss_key, out.unique, lanes);
        const bool empty = a < free_slots;
        const std::uint32_t victim = empty ? 0 : clock_smallest(s.victim_key, window, lanes);
        if (miss == kNoKey || victim == kNoKey) break;
        const std::int64_t heat = kScoreMax - (miss >> 8);
        if (!empty && heat <= static_cast<std::int64_t>(victim >> 8) + c.margin) break;
        lanes.sync();
        if (lanes.lane() == 0) {
            const int u = static_cast<int>(miss & 255u), w = static_cast<int>(victim & 255u);
            const int entry = out.layer * c.experts + out.expert[u];
            const int slot = empty ? v.free_list[free_slots - 1 - a] : s.victim_slot[w];
            const int old = empty ? -1 : slot_owner(v.slot_word[slot]);
            if (old >= 0) v.slot_of[old] = -1;
            if (!empty) s.victim_key[w] = kNoKey;
            v.slot_word[slot] = owner_word(entry);
            v.slot_of[entry] = slot;
            v.header->free_slots -= empty;
            v.header->counters.evictions += old >= 0;
            s.miss_key[u] = kNoKey;
            out.kind[u] = PickKind::Admitted;
            out.slot[u] = slot;
            out.evicted[u] = old;
            ++out.admitted;
        }
        lanes.sync();
    }
}

// One layer's step. picks: (n <= kClockMaxPicks) expert ids of `rows` rows, duplicates allowed, ids outside
// [0, experts) ignored. max_admissions bounds this step beside the config's (0: classify and count only).
template <class Pick, class Lanes>
GLM53_HD void clock_step(const ClockView& v, int layer, const Pick* picks, int n, int rows, int max_admissions,
                         ClockStep& out, ClockScratch& scratch, const Lanes& lanes) {
    const ClockConfig c = v.header->config;
    if (lanes.lane() == 0) out.layer = layer;
    clock_dedup(c.experts, picks, n, out, scratch, lanes);
    clock_advance(v, c, layer, rows, lanes);
    clock_classify(v, c, out, scratch, lanes);
    int limit = out.unique - out.hits;
    limit = limit < c.max_admissions ? limit : c.max_admissions;
    limit = limit < max_admissions ? limit : max_admissions;
    if (limit > 0) clock_admit(v, c, out, scratch, limit, lanes);
    for (int u = lanes.lane(); u < out.unique; u += lanes.width()) {
        if (out.kind[u] == PickKind::Hit) v.slot_word[out.slot[u]] &= ~kBusyFlag;
    }
    if (lanes.lane() == 0) {
        ClockCounters& n_total = v.header->counters;
        n_total.steps += 1;
        n_total.picks += static_cast<std::uint64_t>(n);
        n_total.hits += static_cast<std::uint64_t>(out.hits);
        n_total.misses += static_cast<std::uint64_t>(out.unique - out.hits);
        n_total.admissions += static_cast<std::uint64_t>(out.admitted);
    }
    lanes.sync();
}

// Heats a layer by a whole chunk of a prompt: counts (experts) picks of each expert among `rows` rows, taken as spread
// evenly over them. No slot changes: a prompt's experts become resident by refill, not by this.
template <class Count, class Lanes>
GLM53_HD void clock_note_rows(const ClockView& v, int layer, const Count* counts, int rows, const Lanes& lanes) {
    const ClockConfig c = v.header->config;
    std::uint32_t* heat = v.heat + static_cast<std::size_t>(layer) * c.experts;
    const int all_ages = rows / c.age_rows;
    const int ages = all_ages < 256 ? all_ages : 256;  // more would change nothing
    for (int e = lanes.lane(); e < c.experts; e += lanes.width()) {
        const std::uint64_t added = static_cast<std::uint64_t>(c.gain) * static_cast<std::uint64_t>(counts[e]);
        const auto part = static_cast<std::uint32_t>(added / static_cast<std::uint64_t>(all_ages ? all_ages : 1));
        std::uint32_t word = heat[e];
        for (int age = 0; age < ages; ++age) {
            word = clock_age(c, word);
            word = heat_pack(heat_slow(word) + part, heat_recent(word) + part);
        }
        if (ages == 0) word = heat_pack(heat_slow(word) + part, heat_recent(word) + part);
        heat[e] = word;
    }
    lanes.sync();
}

}  // namespace glm53
