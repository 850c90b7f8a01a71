// State of the expert cache's CLOCK policy: one block of integers, laid out the same on the host and on the device.
//
// An `entry` is one routed expert of one layer: layer * experts + expert. A `slot` is room for one expert's bytes in
// device memory. All layers share one pool of slots.
//
//   slot word, 32 bits        | busy 1 | lent 1 | pins 6 | ref 4 | owner + 1 : 20 |   owner 0: none
//   heat word, 32 bits        | recent 16 | slow 16 |      picks, in units of `gain`; both age every `age_rows` rows
//
// States of a slot
//   Empty     owner none, not lent, on the free list              clock_step, clock_reserve -> Resident, Loading
//   Loading   owner set, pinned, slot_of[owner] is not this slot   clock_publish -> Resident, or Empty where a step was
//                                                                   faster; clock_release -> Empty
//   Resident  owner set, slot_of[owner] == slot                    clock_step (victim), clock_lend -> Empty, Lent
//   Lent      owner none, lent set, not on the free list           clock_give_back -> Empty
// Threads   none inside: whoever holds the block (one CUDA warp on the stream, or one host thread) makes one call at a
//           time. `busy` marks the current step's hits and is clear between calls.
// Costs     4 bytes a slot + 4 of free list, 8 bytes an entry: 105 KiB for 42 x 288 entries and 1,300 slots. It may be
//           copied as bytes between host and device: there are offsets in it but no addresses.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define GLM53_HD __host__ __device__ inline
#else
#define GLM53_HD inline
#endif

namespace glm53 {

inline constexpr int kClockMaxPicks = 64;    // 8 rows x 8 picks: the decode kernels' largest step
inline constexpr int kClockMaxWindow = 128;  // slots that one step may examine
inline constexpr std::uint32_t kClockMaxEntries = (1u << 20) - 1;

// Bit fields of the slot word.
inline constexpr int kOwnerBits = 20, kRefBits = 4, kPinBits = 6, kLentBits = 1, kBusyBits = 1;
static_assert(kOwnerBits + kRefBits + kPinBits + kLentBits + kBusyBits == 32, "the slot word is one 32-bit integer");
inline constexpr int kRefShift = kOwnerBits, kPinShift = kRefShift + kRefBits, kLentShift = kPinShift + kPinBits,
                     kBusyShift = kLentShift + kLentBits;
inline constexpr std::uint32_t kOwnerMask = (1u << kOwnerBits) - 1, kRefMax = (1u << kRefBits) - 1,
                               kPinMax = (1u << kPinBits) - 1, kRefOne = 1u << kRefShift, kPinOne = 1u << kPinShift,
                               kLentFlag = 1u << kLentShift, kBusyFlag = 1u << kBusyShift;

inline constexpr int kHeatBits = 16;
inline constexpr std::uint32_t kHeatMax = (1u << kHeatBits) - 1;
static_assert(2 * kHeatBits == 32, "the heat word is one 32-bit integer");

GLM53_HD int slot_owner(std::uint32_t word) {
    return static_cast<int>(word & kOwnerMask) - 1;
}
GLM53_HD std::uint32_t slot_ref(std::uint32_t word) {
    return (word >> kRefShift) & kRefMax;
}
GLM53_HD std::uint32_t slot_pins(std::uint32_t word) {
    return (word >> kPinShift) & kPinMax;
}
GLM53_HD std::uint32_t owner_word(int entry) {
    return static_cast<std::uint32_t>(entry + 1);
}
GLM53_HD std::uint32_t heat_slow(std::uint32_t heat) {
    return heat & kHeatMax;
}
GLM53_HD std::uint32_t heat_recent(std::uint32_t heat) {
    return heat >> kHeatBits;
}
GLM53_HD std::uint32_t heat_pack(std::uint32_t slow, std::uint32_t recent) {
    return (slow > kHeatMax ? kHeatMax : slow) | (recent > kHeatMax ? kHeatMax : recent) << kHeatBits;
}

// Sizes and knobs. The sizes are fixed for the life of the block; the knobs may be changed between steps.
struct ClockConfig {
    std::int32_t layers = 0, experts = 0, slots = 0;
    std::int32_t window = 32;         // slots examined for victims per step: one a lane of a warp
    std::int32_t max_admissions = 8;  // per step; 0: admission off
    std::int32_t margin = 256;        // a missed expert must beat its victim by more: 4 picks of slow, or 0.8 of both
    std::int32_t ref_max = 2;         // hits a slot is protected for, in revolutions of the hand
    std::int32_t gain = 64;           // heat added per picked row
    std::int32_t age_rows = 16;       // rows of a layer between two agings of its heat
    std::int32_t slow_shift = 4;      // slow -= slow / 2^shift: 16 rows x 2^4 = a window of 256 rows
    std::int32_t recent_shift = 1;    // recent likewise: a window of 32 rows
    std::int32_t recent_weight = 4;   // heat = slow + weight * recent
};

struct ClockCounters {
    std::uint64_t steps = 0, picks = 0;
    std::uint64_t hits = 0, misses = 0;  // of unique picks
    std::uint64_t admissions = 0;        // misses that steps gave a slot
    std::uint64_t evictions = 0;         // entries that lost their slot, to a step or to a borrower
    std::uint64_t refills = 0;           // entries that clock_publish made resident
};

struct ClockHeader {
    ClockConfig config;
    std::int32_t hand = 0, free_slots = 0, lent_slots = 0, reserved = 0;
    ClockCounters counters;
};
inline constexpr std::size_t kClockHeaderBytes = 256;
static_assert(sizeof(ClockHeader) <= kClockHeaderBytes, "the header has 256 bytes at the start of the block");

// Pointers into one block.
struct ClockView {
    ClockHeader* header;
    std::uint32_t* slot_word;  // (slots)
    std::int32_t* slot_of;     // (layers * experts) slot or -1
    std::uint32_t* heat;       // (layers * experts)
    std::int32_t* row_count;   // (layers) rows since the layer's last aging
    std::int32_t* free_list;   // (slots) stack of free_slots slots, top last
};

GLM53_HD std::size_t clock_bytes(const ClockConfig& c) {
    return kClockHeaderBytes +
           4 * (2 * static_cast<std::size_t>(c.slots) + 2 * static_cast<std::size_t>(c.layers) * c.experts + c.layers);
}

// `block`: clock_bytes(config) bytes, 8-byte aligned. Also made on the host for a device block (no access happens).
GLM53_HD ClockView clock_view(void* block, const ClockConfig& c) {
    auto* words = reinterpret_cast<std::uint32_t*>(static_cast<char*>(block) + kClockHeaderBytes);
    const std::size_t entries = static_cast<std::size_t>(c.layers) * c.experts;
    ClockView v{};
    v.header = static_cast<ClockHeader*>(block);
    v.slot_word = words;
    v.slot_of = reinterpret_cast<std::int32_t*>(words + c.slots);
    v.heat = words + c.slots + entries;
    v.row_count = reinterpret_cast<std::int32_t*>(words + c.slots + 2 * entries);
    v.free_list = v.row_count + c.layers;
    return v;
}

}  // namespace glm53
