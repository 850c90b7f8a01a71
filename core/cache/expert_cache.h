// The expert cache: slots of device memory shared by all layers, filled with experts from their home in host memory.
//
// This object owns the slots' memory, the copies and the host's copy of the policy state (clock_state.h). Where kernels
// run the policy on the device, upload() gives them the state, download() takes it back for the rare operations below.
//
// States of a slot, and what ends each
//   Empty     nobody's                     step (admission), refill, lend
//   Loading   a refill's copy is in flight  poll, once its event is done -> Resident (or Empty: a step was faster).
//             The slot is pinned meanwhile and no lookup returns it.
//   Resident  lookups return it            step (victim of an admission) or lend
//   Evicting  instantaneous: an admission is ordered by its stream. Kernels that read the victim were queued there
//             before, the copy that overwrites it is queued after them, and the kernels that read the new expert behind
//             that copy. So step needs no event and no host wait, and must always get the one compute stream.
//   Lent      its whole segment serves something else   take_back -> Empty
// A refill copies on another stream: that one first waits for an event recorded on the compute stream, so that a slot
// just emptied is not overwritten under its last reader; and poll publishes it only after the host saw its own event
// done, so that whatever is queued afterwards reads the new bytes.
//
// Segments  slots are allocated in segments of segment_slots, the unit of lending: lend either hands out the segment's
//           memory (staging) or frees it (so that another allocator can have it) and take_back allocates it again.
// Threads   one at a time, the one that queues the forward pass.
// Costs     step: the policy on one core (a few microseconds) and a copy of slot_bytes an admission. lend blocks for
//           its segment's loads and, when it frees, for the device. verify reads back every resident slot.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache/clock.h"
#include "device/device.h"

namespace glm53 {

struct ExpertCacheConfig {
    ClockConfig clock;  // layers, experts, slots and the policy's knobs
    // Bytes of an expert's parts (gate, up, down, ...), which lie one after the other in a slot, each 256-byte aligned.
    std::vector<std::size_t> part_bytes;
    int segment_slots = 64;  // the last segment may be shorter
    int max_loading = 8;     // refill copies in flight
};

struct ExpertCacheStats {
    ClockCounters counters;
    int slots = 0, resident = 0, loading = 0, empty = 0, lent = 0;
    std::uint64_t slot_bytes = 0;
    std::uint64_t admitted_bytes = 0;  // copied into slots for steps
    std::uint64_t refilled_bytes = 0;  // copied into slots in the background
    std::uint64_t home_bytes = 0;      // read in place by misses that were not admitted
};

struct SlotMismatch {
    int slot, entry, part;
};

class ExpertCache {
  public:
    // homes: (layers * experts * parts) addresses of part bytes, readable by host and device, that outlive this object.
    // DeviceFailure when the slots do not fit; nothing stays allocated then.
    ExpertCache(std::shared_ptr<Device> device, ExpertCacheConfig config, std::vector<const void*> homes);
    ~ExpertCache();
    ExpertCache(const ExpertCache&) = delete;
    ExpertCache& operator=(const ExpertCache&) = delete;

    // clock_step for the layer on this host, and the copies of what it admitted, queued on `stream`.
    const ClockStep& step(int layer, std::span<const std::int64_t> picks, int rows, int max_admissions,
                          StreamHandle stream);
    const ClockScratch& scratch() const { return scratch_; }  // as the last step left it, for split_step
    // clock_note_rows: counts (experts) picks among `rows` rows of a prompt.
    void note_rows(int layer, std::span<const std::int32_t> counts, int rows);

    // Where the expert's part is now: in its slot or at home.
    const void* address(int layer, int expert, int part) const;
    int slot_of(int layer, int expert) const;  // -1: not resident
    void* slot_address(int slot) const;        // nullptr while its segment's memory is freed
    std::size_t part_offset(int part) const { return part_offset_[part]; }
    std::size_t slot_bytes() const { return slot_bytes_; }

    // Keeps a resident expert in its slot; false when it is not resident or pinned 63 times.
    bool pin(int layer, int expert);
    bool unpin(int layer, int expert);

    int segments() const { return static_cast<int>(segments_.size()); }
    int segment_slots(int segment) const;
    // Drops the segment's entries (appended to `dropped`) and lends it. With `release` its memory is freed and nullptr
    // returned, else its address. std::logic_error with nothing changed when it is lent already or a slot in it is
    // pinned.
    void* lend(int segment, bool release, std::vector<std::int32_t>& dropped);
    // The segment's slots become empty again; false, still lent, when its memory cannot be had. The borrower's last use
    // has completed, or was queued on the stream of later steps.
    bool take_back(int segment);

    // Starts copies of the hottest experts that are not resident into empty slots, `count` and max_loading at most;
    // returns how many. Call poll to publish them.
    int refill(int count, StreamHandle copy_stream, StreamHandle compute_stream);
    // Publishes the loads that are done, without blocking; their entries are appended to `published`. Returns how many
    // remain.
    int poll(std::vector<std::int32_t>* published = nullptr);
    // The entries refill would take, hottest first.
    std::vector<std::int32_t> refill_plan(int count) const;

    // Learned warm start: (layers * experts) slow heat, to be saved and given back in another process.
    std::vector<std::uint16_t> export_heat() const;
    void import_heat(std::span<const std::uint16_t> heat);

    // Compares every resident slot with its home, byte by byte. Waits for `stream` first.
    std::vector<SlotMismatch> verify(StreamHandle stream);
    ExpertCacheStats stats() const;

    const ClockConfig& clock() const { return view_.header->config; }
    // Changes the knobs; sizes in `knobs` are ignored. std::invalid_argument for what clock_config_error refuses.
    void set_knobs(ClockConfig knobs);

    // The policy state for kernels: device_block() has state_bytes() in device memory, filled by upload. While kernels
    // own it, only download may be called in between, then any of the above, then upload. Both are ordered on `stream`
    // and wait for it.
    void* device_block();
    std::size_t state_bytes() const { return clock_bytes(view_.header->config); }
    void upload(StreamHandle stream);
    void download(StreamHandle stream);

  private:
    struct Segment {
        char* memory = nullptr;
        bool lent = false;
    };
    struct Load {
        int slot = -1;
        EventHandle done = nullptr;
    };

    int entry_of(int layer, int expert) const;
    void copy_in(int entry, int slot, StreamHandle stream);
    void publish(Load& load, std::vector<std::int32_t>* published);
    std::size_t segment_bytes(int segment) const;
    void destroy() noexcept;

    const std::shared_ptr<Device> device_;
    const ExpertCacheConfig config_;
    const std::vector<const void*> homes_;
    std::vector<std::size_t> part_offset_;
    std::size_t slot_bytes_ = 0;
    std::vector<std::uint64_t> block_;  // the policy state
    ClockView view_{};
    ClockScratch scratch_{};
    ClockStep step_{};
    std::vector<Segment> segments_;
    std::vector<Load> loads_;  // max_loading; slot -1: idle
    EventHandle compute_reached_ = nullptr;
    void* device_block_ = nullptr;
};

}  // namespace glm53
