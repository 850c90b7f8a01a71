// Kernels of the expert cache: one decode step or one prompt chunk of a MoE layer, decided and repointed on the device.
//
// A step is two launches on the compute stream: one warp runs clock_step on the layer's picks, repoints the tables of
// what it touched and lists the admitted experts; a second grid copies those from their pinned home into their slots.
// Everything queued behind them on the stream reads valid addresses. The host waits for nothing. With the CPU lane
// another kernel decides (lane_step.h).
// Costs     decide: one warp, a few microseconds. copy: 50 GB/s of a PCIe 5 x16 link, an empty launch without
//           admissions. prompt: one block, one pass over the picks and one over the experts.
#pragma once
#include <cstdint>

#include "cache/clock_state.h"
#include "device/device.h"

namespace glm53 {

inline constexpr int kExpertParts = 3;     // gate, up, down
inline constexpr int kMaxExperts = 512;    // of a layer, as exllamav3's kernels
inline constexpr int kDecideThreads = 32;  // one warp
inline constexpr int kPromptThreads = 512;

// Where one layer's kernels look experts up: (experts) addresses per part, and the pinned home of expert 0.
struct LayerTables {
    std::int64_t* part[kExpertParts];
    std::uint64_t home;
};

// What prompt chunks asked for. `missing`: distinct experts that no slot had.
struct PromptCounters {
    std::uint64_t passes = 0, picks = 0, distinct = 0, missing = 0;
};

struct CopyList {
    std::int32_t count, reserved;
    std::uint64_t from[kClockMaxPicks], to[kClockMaxPicks];
};

struct ExpertStepView {
    void* block;                    // the policy state, on the device
    ClockConfig sizes;              // layers, experts, slots
    const LayerTables* layers;      // (layers)
    const std::uint64_t* segments;  // (segments) addresses of the slots' memory, 0 while lent
    int segment_slots;
    std::uint64_t slot_bytes;  // also the distance of two experts at home; a multiple of 16
    std::uint32_t part_offset[kExpertParts];
    std::uint64_t* away;  // (layers, experts) where an expert is read that no slot has: its home, or a staging buffer
    CopyList* copies;
    PromptCounters* prompts;
};

// picks: (n) expert ids of `rows` rows in device memory, n <= kClockMaxPicks. DeviceFailure when a launch is refused.
void launch_decode_step(const ExpertStepView& view, int layer, const std::int64_t* picks, int n, int rows,
                        int max_admissions, StreamHandle stream);
// The second launch of a step: copies what the first one listed.
void launch_copy_admitted(const ExpertStepView& view, StreamHandle stream);

// Counts a chunk's picks; with `point` the whole layer's table is set to slot or home.
void launch_prompt_step(const ExpertStepView& view, int layer, const std::int64_t* picks, int n, int rows, bool point,
                        StreamHandle stream);

// Copies a layer's entries from `image`, (parts + 1, experts) addresses in pinned host memory, into its tables and, the
// last row, into `away`. By a kernel, not by the copy engine, which would put it behind the experts that it is bringing
// for the next layer.
void launch_write_tables(const ExpertStepView& view, int layer, const std::int64_t* image, StreamHandle stream);

}  // namespace glm53
