// The rare operations on the CLOCK state, for one thread: set-up, pins, lending slots, loading in the background.
// Each is O(what it touches) except clock_init and the free-list rebuild of clock_lend (O(slots)).
#pragma once
#include "cache/clock_state.h"

namespace glm53 {

// nullptr when `c` is usable, else what is wrong with it.
GLM53_HD const char* clock_config_error(const ClockConfig& c) {
    if (c.layers < 1 || c.experts < 1 || c.slots < 1) return "layers, experts and slots must be at least 1";
    if (static_cast<std::uint64_t>(c.layers) * static_cast<std::uint64_t>(c.experts) > kClockMaxEntries) {
        return "layers * experts must fit 20 bits";
    }
    if (c.window < 1 || c.window > kClockMaxWindow) return "window must be 1..128";
    if (c.max_admissions < 0 || c.margin < 0) return "max_admissions and margin must not be negative";
    if (c.ref_max < 0 || c.ref_max > 15) return "ref_max must be 0..15";
    if (c.gain < 1 || c.gain > 1024 || c.age_rows < 1) return "gain must be 1..1024 and age_rows at least 1";
    if (c.slow_shift < 0 || c.slow_shift > 15 || c.recent_shift < 0 || c.recent_shift > 15)
        return "shifts must be 0..15";
    if (c.recent_weight < 0 || c.recent_weight > 64) return "recent_weight must be 0..64";
    return nullptr;
}

// Everything empty and cold; slot 0 is filled first.
GLM53_HD void clock_init(void* block, const ClockConfig& c) {
    const ClockView v = clock_view(block, c);
    *v.header = ClockHeader{};
    v.header->config = c;
    v.header->free_slots = c.slots;
    for (int i = 0; i < c.slots; ++i) {
        v.slot_word[i] = 0;
        v.free_list[i] = c.slots - 1 - i;
    }
    for (int i = 0; i < c.layers * c.experts; ++i) {
        v.slot_of[i] = -1;
        v.heat[i] = 0;
    }
    for (int i = 0; i < c.layers; ++i) v.row_count[i] = 0;
}

// Keeps a slot from being a victim or lent; false when its 6-bit counter is full.
GLM53_HD bool clock_pin(const ClockView& v, int slot) {
    if (slot_pins(v.slot_word[slot]) == kPinMax) return false;
    v.slot_word[slot] += kPinOne;
    return true;
}

// False when the slot was not pinned.
GLM53_HD bool clock_unpin(const ClockView& v, int slot) {
    if (slot_pins(v.slot_word[slot]) == 0) return false;
    v.slot_word[slot] -= kPinOne;
    return true;
}

// Empties an unpinned slot whose owner, if any, it returns (-1: none). The slot is not put on the free list.
GLM53_HD int clock_drop(const ClockView& v, int slot) {
    const int owner = slot_owner(v.slot_word[slot]);
    if (owner >= 0 && v.slot_of[owner] == slot) v.slot_of[owner] = -1;
    v.slot_word[slot] &= kLentFlag;
    return owner;
}

// Lends slots [first, first + count) to something else: their entries are dropped and written to `dropped` (count),
// tables must be repointed home by the caller. Returns how many were dropped, or -1 with nothing changed when a slot
// of the range is pinned, loading or lent already.
GLM53_HD int clock_lend(const ClockView& v, int first, int count, std::int32_t* dropped) {
    for (int s = first; s < first + count; ++s) {
        if (slot_pins(v.slot_word[s]) || (v.slot_word[s] & kLentFlag)) return -1;
    }
    int n = 0;
    for (int s = first; s < first + count; ++s) {
        const int owner = clock_drop(v, s);
        if (owner >= 0) dropped[n++] = owner;
        v.slot_word[s] = kLentFlag;
    }
    int kept = 0;
    for (int i = 0; i < v.header->free_slots; ++i) {
        const int s = v.free_list[i];
        if (s < first || s >= first + count) v.free_list[kept++] = s;
    }
    v.header->free_slots = kept;
    v.header->lent_slots += count;
    v.header->counters.evictions += static_cast<std::uint64_t>(n);
    return n;
}

// Takes lent slots of the range back as empty ones; slots that were not lent stay as they are. Returns how many came
// back.
GLM53_HD int clock_give_back(const ClockView& v, int first, int count) {
    int n = 0;
    for (int s = first + count - 1; s >= first; --s) {
        if (!(v.slot_word[s] & kLentFlag)) continue;
        v.slot_word[s] = 0;
        v.free_list[v.header->free_slots++] = s;
        ++n;
    }
    v.header->lent_slots -= n;
    return n;
}

// Empty -> Loading: takes an empty slot for `entry` and pins it; steps do not see it until clock_publish. -1 when there
// is no empty slot or the entry is resident.
GLM53_HD int clock_reserve(const ClockView& v, int entry) {
    if (v.header->free_slots == 0 || v.slot_of[entry] >= 0) return -1;
    const int slot = v.free_list[--v.header->free_slots];
    v.slot_word[slot] = owner_word(entry) | kPinOne;
    return slot;
}

// Loading -> Empty.
GLM53_HD void clock_release(const ClockView& v, int slot) {
    v.slot_word[slot] = 0;
    v.free_list[v.header->free_slots++] = slot;
}

// Loading -> Resident once the bytes are there; returns the entry whose table the caller repoints to the slot. If a
// step admitted the entry elsewhere meanwhile, the slot becomes empty again and -1 is returned.
GLM53_HD int clock_publish(const ClockView& v, int slot) {
    const int entry = slot_owner(v.slot_word[slot]);
    if (v.slot_of[entry] >= 0) {
        clock_release(v, slot);
        return -1;
    }
    v.slot_word[slot] = owner_word(entry);
    v.slot_of[entry] = slot;
    v.header->counters.refills += 1;
    return entry;
}

}  // namespace glm53
