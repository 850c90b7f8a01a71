// What the GPU engine's hooks call: keeps every MoE layer's address tables valid while experts move.
//
// Three ways a layer's experts are found, chosen by the caller per forward pass:
//   decode   up to 64 picks. clock_step decides; misses are read at home, admitted ones copied first. On a CUDA device
//            the policy state lives there and nothing here waits (cuda/expert_step.h).
//   prompt   a short prompt chunk: the picks are counted and read where they are, slot or home.
//   long prompt   begin_prompt ... enter_layer(0), enter_layer(1), ... finish_prompt: every layer's missing experts are
//            copied one layer ahead into staging buffers; the layer's tables point there until finish_prompt, and those
//            of the last two layers entered longer: nothing overwrites the buffers before the next long prompt or
//            free_staging, so that the passes in between, first of all the rest of the same prompt, find these layers
//            in VRAM.
//
// Invariant  each table entry is the expert's slot or where it is "away": at home or, while it is staged, in a staging
//            buffer. All of them hold its bytes: an entry may be stale (home though resident), never wrong.
// States     Ready -> Prompt (begin_prompt) -> Ready (finish_prompt, also after a failed pass). Between download and
//            upload the host owns the policy state; every public call leaves it with the device.
// CPU lane   attach_lane ... detach_lane, between passes. While one is attached, decode_split may stand for decode: the
//            coldest misses get their sum from the lane's workers, and add_partial adds it behind the experts' kernels
//            of the same layer. The lane is open until a job of it is not kOk, then it gets nothing any more and
//            decode_split is decode. Everything else, decode too, is the same with and without it.
// Threads    one, the one that queues the forward passes; `compute` is always its stream.
// Costs      decode and prompt: one call, one or two launches. enter_layer waits for the layer's copies to be issued.
//            begin_prompt, and what follows from lend to stats: the policy state (100 KiB) is copied to the host and,
//            where it changes, back, with a wait for `compute`, so they belong between forward passes.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache/expert_cache.h"
#include "cache/split.h"
#include "cpu/lane_block.h"
#include "cuda/expert_step.h"
#include "memory/host_arena.h"
#include "memory/stage_feeder.h"
#include "memory/staging.h"

namespace glm53 {

struct ExpertRuntimeConfig {
    ClockConfig clock;                    // layers, experts, slots and the policy's knobs
    std::vector<std::size_t> part_bytes;  // gate, up, down
    int segment_slots = 32;               // the unit of lending
    int max_loading = 8;                  // refill copies in flight
};

struct RuntimeStats {
    ExpertCacheStats cache;
    PromptCounters prompts;
    std::uint64_t staged_bytes = 0;  // copied into staging buffers
    std::uint64_t staged_experts = 0;
    std::uint64_t long_prompts = 0;
    std::uint64_t host_waits = 0;  // times a call here waited for the compute stream
    std::uint64_t cpu_picks = 0;   // distinct experts of a step that the CPU lane computed
    std::uint64_t cpu_steps = 0;   // steps of a layer that had any
    std::uint64_t cpu_bytes = 0;   // of those experts; not in cache.home_bytes, for they did not cross PCIe
};

class LaneLink;

class ExpertRuntime {
  public:
    // layers: (layers) tables of (experts) entries and homes laid out like slots (parts 256-byte aligned, experts
    // slot_bytes apart); both outlive this object. Sets all tables to home. DeviceFailure, std::invalid_argument.
    ExpertRuntime(std::shared_ptr<Device> device, ExpertRuntimeConfig config, std::vector<LayerTables> layers);
    ~ExpertRuntime();
    ExpertRuntime(const ExpertRuntime&) = delete;
    ExpertRuntime& operator=(const ExpertRuntime&) = delete;

    // picks: (n) expert ids of `rows` rows, readable by the device.
    void decode(int layer, const std::int64_t* picks, int n, int rows, StreamHandle compute);
    void prompt(int layer, const std::int64_t* picks, int n, int rows, StreamHandle compute);

    // arena: at least lane_block_bytes(hidden) bytes, page-locked for this device, not sealed, the one that a CpuLane
    // over the same layers serves; it outlives the attachment. limit: how long add_partial waits for a sum, longer than
    // the lane's own limit. To be called while the compute stream is idle. std::logic_error when one is attached,
    // std::invalid_argument for what does not fit.
    void attach_lane(HostArena& arena, int hidden, const SplitConfig& split, std::chrono::milliseconds limit);
    void detach_lane(StreamHandle compute);  // does nothing when none is attached
    bool has_lane() const { return lane_ != nullptr; }
    void set_split(const SplitConfig& split, StreamHandle compute);
    // decode for n = rows * top_k picks of up to 8 rows, and the CPU's part of them. x (rows, hidden) and weights
    // (rows, top_k), fp16 and contiguous; x 16-byte aligned. Writes 0 over the weights of picks that went to the CPU
    // (cuda/lane_step.h says why); picks stay.
    void decode_split(int layer, const std::int64_t* picks, int n, int rows, const void* x, void* weights,
                      StreamHandle compute);
    // out (rows, hidden), floats or fp16 (`half`), += what the CPU computed for the last decode_split, if that gave it
    // anything; rows are that step's. A sum that was not asked for is dropped by whatever comes next.
    void add_partial(int rows, void* out, bool half, StreamHandle compute);
    // kOk until a sum was not had; one word of host memory, no wait. The step in which it changed has no valid output.
    cpu::LaneVerdict lane_verdict() const;

    // stage_bytes: size of each of the two buffers, rounded down to whole experts, at least one. layers: how many the
    // pass will enter (0: all); those behind are not brought, and if it enters one nevertheless, that waits for its
    // copies.
    void begin_prompt(std::size_t stage_bytes, StreamHandle compute, StreamHandle copy, int layers = 0);
    void enter_layer(int layer, const std::int64_t* picks, int n, int rows);
    void finish_prompt();
    bool in_prompt() const { return feeder_ != nullptr; }
    // Where a long prompt's layer that was entered finds an expert: its slot, a staging buffer, or its home. Does not
    // change before finish_prompt. std::logic_error outside of a long prompt.
    std::uint64_t expert_address(int layer, int expert) const;
    bool has_staging() const { return staging_ != nullptr; }
    void free_staging();  // gives the buffers' memory back; not during a long prompt

    // Lends the last segments until at least `bytes` are free for others, or none is left; returns the bytes lent by
    // this call.
    std::size_t lend(std::size_t bytes, StreamHandle compute);
    // Takes lent segments back as empty slots while their memory can be had; returns how many slots came back.
    int take_back(StreamHandle compute);
    // Publishes finished background copies and starts new ones; returns 0 once nothing is in flight or left to start.
    int refill(int count, StreamHandle compute, StreamHandle copy);

    std::vector<std::uint16_t> export_heat(StreamHandle compute);
    void import_heat(std::span<const std::uint16_t> heat, StreamHandle compute);
    void set_knobs(const ClockConfig& knobs, StreamHandle compute);
    std::vector<std::int32_t> residency(StreamHandle compute);  // (layers * experts) slot or -1
    std::vector<SlotMismatch> verify(StreamHandle compute);
    RuntimeStats stats(StreamHandle compute);

    std::size_t slot_bytes() const { return cache_->slot_bytes(); }

  private:
    enum Region { kStaged, kRestored, kRegions };  // of mirrors_
    struct DeviceMemory;  // the device's copies of tables' addresses, segments, copy list and counters

    void check_layer(int layer) const;
    void check_decode(int layer, int n, int rows) const;
    const ClockStep& host_step(int layer, const std::int64_t* picks, int n, int rows, int max_admissions,
                               StreamHandle compute);
    const ExpertStepView& view() const;  // on a device with kernels
    LaneLink& attached() const;
    bool on_device() const { return memory_ != nullptr; }
    void download(StreamHandle compute);
    void upload(StreamHandle compute);
    std::uint64_t home(int layer, int expert) const;
    std::uint64_t& away(int layer, int expert) {
        return away_[static_cast<std::size_t>(layer * config_.clock.experts + expert)];
    }
    std::uint64_t found(int layer, int expert) const;       // its slot, or where it is away
    void point(int layer, int expert, std::uint64_t base);  // host tables only
    void image(int region, int layer);
    void unstage(int layer, StreamHandle compute);
    void unstage_kept(StreamHandle compute);
    void point_all(StreamHandle compute);
    std::int64_t* mirror(int region, int layer, int part) const;
    void write_tables(int region, int layer, StreamHandle compute);
    void queue_layer(int layer);
    void note_staged(int layer, const std::vector<StagePiece>& pieces);

    const std::shared_ptr<Device> device_;
    const ExpertRuntimeConfig config_;
    const std::vector<LayerTables> layers_;
    std::unique_ptr<ExpertCache> cache_;
    std::vector<std::uint64_t> away_;     // (layers, experts)
    std::vector<int> kept_;               // layers that still point into the staging buffers after a long prompt
    std::unique_ptr<HostArena> mirrors_;  // pinned images of all tables: [staged, restored]
    std::unique_ptr<DeviceMemory> memory_;
    std::unique_ptr<StagingBuffers> staging_;
    std::unique_ptr<StageFeeder> feeder_;  // during a long prompt
    std::unique_ptr<LaneLink> lane_;
    StreamHandle compute_ = nullptr, copy_ = nullptr;
    int entered_ = -1;     // of a long prompt: the last layer entered,
    int queued_ = 0;       // the next one to queue,
    int pass_layers_ = 0;  // and how many it was said to enter
    RuntimeStats totals_;
};

}  // namespace glm53
