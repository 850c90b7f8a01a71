#include "cache/expert_cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cache/clock_admin.h"
#include "common/bytes.h"

namespace glm53 {
namespace {

constexpr std::size_t kPartAlign = 256;

ExpertCacheConfig checked(ExpertCacheConfig config, std::size_t homes) {
    const ClockConfig& c = config.clock;
    if (const char* error = clock_config_error(c)) throw std::invalid_argument(std::string("ExpertCache: ") + error);
    if (config.segment_slots < 1 || config.max_loading < 1) {
        throw std::invalid_argument("ExpertCache: segment_slots and max_loading must be at least 1");
    }
    if (config.part_bytes.empty()) throw std::invalid_argument("ExpertCache: an expert must have at least one part");
    const std::size_t wanted = static_cast<std::size_t>(c.layers) * c.experts * config.part_bytes.size();
    if (homes != wanted) {
        throw std::invalid_argument("ExpertCache: " + std::to_string(homes) + " home addresses, " +
                                    std::to_string(wanted) + " needed (layers x experts x parts)");
    }
    return config;
}

}  // namespace

ExpertCache::ExpertCache(std::shared_ptr<Device> device, ExpertCacheConfig config, std::vector<const void*> homes)
    : device_(std::move(device)), config_(checked(std::move(config), homes.size())), homes_(std::move(homes)) {
    for (const std::size_t bytes : config_.part_bytes) {
        part_offset_.push_back(slot_bytes_);
        slot_bytes_ += align_up(bytes, kPartAlign);
    }
    const ClockConfig& c = config_.clock;
    block_.resize(clock_bytes(c) / sizeof(std::uint64_t) + 1);
    clock_init(block_.data(), c);
    view_ = clock_view(block_.data(), c);
    try {
        segments_.resize((c.slots + config_.segment_slots - 1) / config_.segment_slots);
        for (int i = 0; i < segments(); ++i) {
            segments_[i].memory = static_cast<char*>(device_->alloc(segment_bytes(i)));
        }
        loads_.resize(config_.max_loading);
        for (Load& load : loads_) load.done = device_->event_create();
        compute_reached_ = device_->event_create();
    } catch (...) {
        destroy();
        throw;
    }
}

ExpertCache::~ExpertCache() {
    destroy();
}

void ExpertCache::destroy() noexcept {
    for (const Load& load : loads_) {
        if (load.slot >= 0) {
            try {
                device_->event_wait(load.done);
            } catch (const DeviceFailure&) {  // a device that is gone has no copy in flight
            }
        }
        if (load.done) device_->event_destroy(load.done);
    }
    if (compute_reached_) device_->event_destroy(compute_reached_);
    for (const Segment& segment : segments_) device_->free(segment.memory);
    device_->free(device_block_);
}

int ExpertCache::entry_of(int layer, int expert) const {
    const ClockConfig& c = clock();
    if (layer < 0 || layer >= c.layers || expert < 0 || expert >= c.experts) {
        throw std::out_of_range("ExpertCache: no expert " + std::to_string(expert) + " in layer " +
                                std::to_string(layer));
    }
    return layer * c.experts + expert;
}

void* ExpertCache::slot_address(int slot) const {
    if (slot < 0 || slot >= clock().slots) throw std::out_of_range("ExpertCache: no slot " + std::to_string(slot));
    char* memory = segments_[slot / config_.segment_slots].memory;
    return memory ? memory + static_cast<std::size_t>(slot % config_.segment_slots) * slot_bytes_ : nullptr;
}

int ExpertCache::slot_of(int layer, int expert) const {
    return view_.slot_of[entry_of(layer, expert)];
}

const void* ExpertCache::address(int layer, int expert, int part) const {
    const int entry = entry_of(layer, expert);
    const std::size_t parts = part_offset_.size();
    if (part < 0 || part >= static_cast<int>(parts)) {
        throw std::out_of_range("ExpertCache: no part " + std::to_string(part));
    }
    const int slot = view_.slot_of[entry];
    if (slot < 0) return homes_[entry * parts + part];
    return static_cast<char*>(slot_address(slot)) + part_offset_[part];
}

void ExpertCache::copy_in(int entry, int slot, StreamHandle stream) {
    char* to = static_cast<char*>(slot_address(slot));
    const std::size_t parts = part_offset_.size();
    for (std::size_t part = 0; part < parts; ++part) {
        device_->copy_async(to + part_offset_[part], homes_[entry * parts + part], config_.part_bytes[part], stream);
    }
}

const ClockStep& ExpertCache::step(int layer, std::span<const std::int64_t> picks, int rows, int max_admissions,
                                   StreamHandle stream) {
    entry_of(layer, 0);
    if (picks.size() > kClockMaxPicks || rows < 0) {
        throw std::invalid_argument("ExpertCache: a step has at most " + std::to_string(kClockMaxPicks) +
                                    " picks, got " + std::to_string(picks.size()) + " of " + std::to_string(rows) +
                                    " rows");
    }
    clock_step(view_, layer, picks.data(), static_cast<int>(picks.size()), rows, max_admissions, step_, scratch_,
               SerialLanes{});
    int u = 0;
    try {
        for (; u < step_.unique; ++u) {
            if (step_.kind[u] == PickKind::Admitted) copy_in(entry_of(layer, step_.expert[u]), step_.slot[u], stream);
        }
    } catch (...) {
        for (; u < step_.unique; ++u) {  // a slot whose copy was not queued must not look resident
            if (step_.kind[u] != PickKind::Admitted) continue;
            clock_drop(view_, step_.slot[u]);
            clock_release(view_, step_.slot[u]);
        }
        throw;
    }
    return step_;
}

void ExpertCache::note_rows(int layer, std::span<const std::int32_t> counts, int rows) {
    entry_of(layer, 0);
    if (counts.size() != static_cast<std::size_t>(clock().experts) || rows < 0 ||
        std::ranges::any_of(counts, [](std::int32_t n) { return n < 0; })) {
        throw std::invalid_argument("ExpertCache: note_rows needs " + std::to_string(clock().experts) +
                                    " counts of 0 or more, got " + std::to_string(counts.size()));
    }
    clock_note_rows(view_, layer, counts.data(), rows, SerialLanes{});
}

bool ExpertCache::pin(int layer, int expert) {
    const int slot = slot_of(layer, expert);
    return slot >= 0 && clock_pin(view_, slot);
}

bool ExpertCache::unpin(int layer, int expert) {
    const int slot = slot_of(layer, expert);
    return slot >= 0 && clock_unpin(view_, slot);
}

void ExpertCache::set_knobs(ClockConfig knobs) {
    const ClockConfig& now = clock();
    knobs.layers = now.layers;
    knobs.experts = now.experts;
    knobs.slots = now.slots;
    if (const char* error = clock_config_error(knobs)) {
        throw std::invalid_argument(std::string("ExpertCache: ") + error);
    }
    view_.header->config = knobs;
}

std::vector<std::uint16_t> ExpertCache::export_heat() const {
    std::vector<std::uint16_t> heat(static_cast<std::size_t>(clock().layers) * clock().experts);
    for (std::size_t i = 0; i < heat.size(); ++i) heat[i] = static_cast<std::uint16_t>(heat_slow(view_.heat[i]));
    return heat;
}

void ExpertCache::import_heat(std::span<const std::uint16_t> heat) {
    const std::size_t entries = static_cast<std::size_t>(clock().layers) * clock().experts;
    if (heat.size() != entries) {
        throw std::invalid_argument("ExpertCache: " + std::to_string(heat.size()) + " heat values, " +
                                    std::to_string(entries) + " needed (layers x experts)");
    }
    for (std::size_t i = 0; i < entries; ++i) view_.heat[i] = heat_pack(heat[i], 0);
}

std::vector<SlotMismatch> ExpertCache::verify(StreamHandle stream) {
    device_->stream_synchronize(stream);
    std::vector<SlotMismatch> wrong;
    std::vector<std::byte> bytes(slot_bytes_);
    const std::size_t parts = part_offset_.size();
    for (int slot = 0; slot < clock().slots; ++slot) {
        const int entry = slot_owner(view_.slot_word[slot]);
        if (entry < 0 || view_.slot_of[entry] != slot) continue;
        device_->copy_async(bytes.data(), slot_address(slot), slot_bytes_, stream);
        device_->stream_synchronize(stream);
        for (std::size_t part = 0; part < parts; ++part) {
            if (std::memcmp(bytes.data() + part_offset_[part], homes_[entry * parts + part],
                            config_.part_bytes[part]) != 0) {
                wrong.push_back({slot, entry, static_cast<int>(part)});
            }
        }
    }
    return wrong;
}

ExpertCacheStats ExpertCache::stats() const {
    ExpertCacheStats stats;
    const ClockHeader& header = *view_.header;
    stats.counters = header.counters;
    stats.slots = header.config.slots;
    stats.empty = header.free_slots;
    stats.lent = header.lent_slots;
    stats.loading = static_cast<int>(std::ranges::count_if(loads_, [](const Load& l) { return l.slot >= 0; }));
    stats.resident = stats.slots - stats.empty - stats.lent - stats.loading;
    std::size_t expert_bytes = 0;
    for (const std::size_t bytes : config_.part_bytes) expert_bytes += bytes;
    stats.slot_bytes = slot_bytes_;
    stats.admitted_bytes = stats.counters.admissions * expert_bytes;
    stats.refilled_bytes = stats.counters.refills * expert_bytes;
    stats.home_bytes = (stats.counters.misses - stats.counters.admissions) * expert_bytes;
    return stats;
}

}  // namespace glm53
