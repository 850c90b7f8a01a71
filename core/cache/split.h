// The CPU/GPU split of one step's misses, on integers only: the coldest misses go to the CPU lane, the others over
// PCIe. The same code runs on one host thread (SerialLanes) and on one CUDA warp (WarpLanes), with equal results.
//
//   n misses, coldest first; the first c go to the CPU:  time(c) = max(cpu(c), gpu(c)),  c = 0 .. limit
//   cpu(0) = 0, cpu(c) = A + sum over the c coldest of (B + (rows - 1) * B_row)
//   gpu(c) = g + (n - c) * T
//
// An expert that several rows picked is decoded once for all of them on either lane: over PCIe its rows cost nothing
// more, on the CPU each further row costs B_row. The smallest time wins; among equal ones the smallest c, since the GPU
// computes those experts as exact mode does.
// Never on the CPU  hits, also those in a staging buffer, which do not count in n; and misses that the policy admitted:
//          those cross PCIe in any case and count in n - c.
// Costs    n^2 / 32 compares and n^2 / 32 additions a lane of a warp for n misses, two reductions.
#pragma once
#include "cache/clock.h"

namespace glm53 {

// Measured on the host at start. Times in nanoseconds.
struct SplitConfig {
    std::int32_t handoff_ns = 110'000;      // A: handing a step to the CPU and taking the sum back
    std::int32_t cpu_expert_ns = 104'000;   // B: one expert for one row, all workers together
    std::int32_t cpu_row_ns = 26'000;       // B_row: each further row of it
    std::int32_t pcie_expert_ns = 400'000;  // T: one expert read or copied over PCIe
    std::int32_t cached_ns = 100'000;       // g: the experts that are in VRAM already
    std::int32_t max_cpu = kClockMaxPicks;  // experts that the CPU may take in one step; 0: lane off
    // Misses that one step may admit while the lane is on, beside the policy's own limit. An admitted miss crosses PCIe
    // before the step goes on; one costs nothing, for the hottest miss would cross anyway (bench/trace_lanes.py, which
    // simulates it).
    std::int32_t max_admissions = 1;
};

inline constexpr std::int32_t kSplitMaxNs = 1'000'000'000;

// nullptr, or what is wrong with a config.
GLM53_HD const char* split_config_error(const SplitConfig& c) {
    const std::int32_t times[] = {c.handoff_ns, c.cpu_expert_ns, c.cpu_row_ns, c.pcie_expert_ns, c.cached_ns};
    for (const std::int32_t t : times) {
        if (t < 0 || t > kSplitMaxNs) return "a time of the split must be 0 to 1 s";
    }
    return c.max_cpu < 0 || c.max_admissions < 0 ? "max_cpu and max_admissions must not be negative" : nullptr;
}

// What a split decided. Times are what the model expects; 0 for a lane without work, 2^32 - 2 at most.
struct SplitStep {
    std::int32_t misses, cpu;  // cpu of the misses go to the CPU
    std::uint32_t cpu_ns, gpu_ns;
    std::int32_t on_cpu[kClockMaxPicks];  // by index into ClockStep.expert: 1 when the CPU computes it
};

// Working room: shared memory on the device.
struct SplitScratch {
    std::int32_t order[kClockMaxPicks];  // indices of the misses that may go to the CPU, coldest first
};

// Where a layer's experts are read that no slot has: at `home`, `stride` bytes apart, or in a staging buffer of device
// memory.
struct AwayRow {
    const std::uint64_t* at;  // (experts)
    std::uint64_t home, stride;
    GLM53_HD bool staged(int expert) const { return at[expert] != home + static_cast<std::uint64_t>(expert) * stride; }
};

// To be called between clock_step and split_step: makes staged misses hits, as which the split must see them.
template <class Lanes>
GLM53_HD void split_staged(const AwayRow& away, ClockStep& step, ClockScratch& clock, const Lanes& lanes) {
    for (int u = lanes.lane(); u < step.unique; u += lanes.width()) {
        if (step.kind[u] == PickKind::Miss && away.staged(step.expert[u])) clock.miss_key[u] = kNoKey;
    }
    lanes.sync();
    int staged = 0;
    for (int u = 0; u < step.unique; ++u) staged += step.kind[u] == PickKind::Miss && clock.miss_key[u] == kNoKey;
    lanes.sync();
    if (lanes.lane() == 0) step.hits += staged;
    lanes.sync();
}

GLM53_HD std::uint32_t split_clip(std::uint64_t ns) {
    return ns < kNoKey ? static_cast<std::uint32_t>(ns) : kNoKey - 1;
}

// Fills order; returns how many misses may go to the CPU. clock_step leaves in miss_key a different key for each
// missed expert (the smallest is the hottest) and kNoKey for hits and admitted ones.
template <class Lanes>
GLM53_HD int split_order(const ClockStep& step, const ClockScratch& clock, SplitScratch& s, const Lanes& lanes) {
    int movable = 0;
    for (int u = 0; u < step.unique; ++u) movable += clock.miss_key[u] != kNoKey;
    for (int u = lanes.lane(); u < step.unique; u += lanes.width()) {
        if (clock.miss_key[u] == kNoKey) continue;
        int colder = 0;
        for (int other = 0; other < step.unique; ++other) {
            colder += clock.miss_key[other] != kNoKey && clock.miss_key[other] > clock.miss_key[u];
        }
        s.order[colder] = u;
    }
    lanes.sync();
    return movable;
}

GLM53_HD std::uint64_t split_cpu_ns(const SplitConfig& c, const ClockStep& step, const SplitScratch& s, int count) {
    if (count == 0) return 0;
    std::uint64_t ns = static_cast<std::uint64_t>(c.handoff_ns);
    for (int i = 0; i < count; ++i) {
        const std::int32_t more_rows = step.rows[s.order[i]] - 1;
        ns += static_cast<std::uint64_t>(c.cpu_expert_ns) + static_cast<std::uint64_t>(c.cpu_row_ns) * more_rows;
    }
    return ns;
}

GLM53_HD std::uint64_t split_gpu_ns(const SplitConfig& c, int misses, int count) {
    return static_cast<std::uint64_t>(c.cached_ns) + static_cast<std::uint64_t>(c.pcie_expert_ns) * (misses - count);
}

GLM53_HD std::uint32_t split_time(const SplitConfig& c, const ClockStep& step, const SplitScratch& s, int misses,
                                  int count) {
    const std::uint64_t cpu = split_cpu_ns(c, step, s, count), gpu = split_gpu_ns(c, misses, count);
    return split_clip(cpu > gpu ? cpu : gpu);
}

// Splits the misses of `step`. Call it right after clock_step, with the scratch that clock_step was given.
template <class Lanes>
GLM53_HD void split_step(const SplitConfig& c, const ClockStep& step, const ClockScratch& clock, SplitStep& out,
                         SplitScratch& s, const Lanes& lanes) {
    const int movable = split_order(step, clock, s, lanes);
    const int misses = step.unique - step.hits;
    const int limit = movable < c.max_cpu ? movable : c.max_cpu;
    std::uint32_t mine = kNoKey, best_count = kNoKey;
    for (int count = lanes.lane(); count <= limit; count += lanes.width()) {
        const std::uint32_t ns = split_time(c, step, s, misses, count);
        if (ns < mine) {
            mine = ns;
            best_count = static_cast<std::uint32_t>(count);
        }
    }
    const std::uint32_t best = lanes.min(mine);
    const int count = static_cast<int>(lanes.min(mine == best ? best_count : kNoKey));
    for (int u = lanes.lane(); u < step.unique; u += lanes.width()) out.on_cpu[u] = 0;
    lanes.sync();
    for (int i = lanes.lane(); i < count; i += lanes.width()) out.on_cpu[s.order[i]] = 1;
    if (lanes.lane() == 0) {
        out.misses = misses;
        out.cpu = count;
        out.cpu_ns = split_clip(split_cpu_ns(c, step, s, count));
        out.gpu_ns = split_clip(split_gpu_ns(c, misses, count));
    }
    lanes.sync();
}

}  // namespace glm53
