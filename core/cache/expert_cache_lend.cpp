// ExpertCache's rare side: lending segments, background refill, and handing the policy state to kernels.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "cache/clock_admin.h"
#include "cache/clock_plan.h"
#include "cache/expert_cache.h"

namespace glm53 {

int ExpertCache::segment_slots(int segment) const {
    if (segment < 0 || segment >= segments()) {
        throw std::out_of_range("ExpertCache: no segment " + std::to_string(segment));
    }
    return std::min(config_.segment_slots, clock().slots - segment * config_.segment_slots);
}

std::size_t ExpertCache::segment_bytes(int segment) const {
    return segment_slots(segment) * slot_bytes_;
}

void* ExpertCache::lend(int segment, bool release, std::vector<std::int32_t>& dropped) {
    const int count = segment_slots(segment), first = segment * config_.segment_slots;
    Segment& lent = segments_[segment];
    if (lent.lent) throw std::logic_error("ExpertCache: segment " + std::to_string(segment) + " is lent already");
    for (int slot = first; slot < first + count; ++slot) {
        const int owner = slot_owner(view_.slot_word[slot]);
        if (owner >= 0 && view_.slot_of[owner] == slot && slot_pins(view_.slot_word[slot])) {
            throw std::logic_error("ExpertCache: slot " + std::to_string(slot) + " of segment " +
                                   std::to_string(segment) + " is pinned");
        }
    }
    for (Load& load : loads_) {
        if (load.slot < first || load.slot >= first + count) continue;
        device_->event_wait(load.done);
        clock_release(view_, load.slot);
        load.slot = -1;
    }
    std::vector<std::int32_t> entries(count);
    const int n = clock_lend(view_, first, count, entries.data());  // cannot refuse: no pin, load or loan is left in it
    dropped.insert(dropped.end(), entries.begin(), entries.begin() + n);
    lent.lent = true;
    if (!release) return lent.memory;
    device_->free(lent.memory);
    lent.memory = nullptr;
    return nullptr;
}

bool ExpertCache::take_back(int segment) {
    const int count = segment_slots(segment);
    Segment& lent = segments_[segment];
    if (!lent.lent) throw std::logic_error("ExpertCache: segment " + std::to_string(segment) + " is not lent");
    if (!lent.memory) {
        try {
            lent.memory = static_cast<char*>(device_->alloc(segment_bytes(segment)));
        } catch (const DeviceFailure&) {
            return false;
        }
    }
    clock_give_back(view_, segment * config_.segment_slots, count);
    lent.lent = false;
    return true;
}

std::vector<std::int32_t> ExpertCache::refill_plan(int count) const {
    return clock_hottest_missing(view_, count);
}

int ExpertCache::refill(int count, StreamHandle copy_stream, StreamHandle compute_stream) {
    const int idle = static_cast<int>(std::ranges::count_if(loads_, [](const Load& l) { return l.slot < 0; }));
    const std::vector<std::int32_t> plan = refill_plan(std::min({count, idle, view_.header->free_slots}));
    if (plan.empty()) return 0;
    device_->event_record(compute_reached_, compute_stream);
    device_->stream_wait(copy_stream, compute_reached_);
    auto load = loads_.begin();
    for (const std::int32_t entry : plan) {
        load = std::find_if(load, loads_.end(), [](const Load& l) { return l.slot < 0; });
        load->slot = clock_reserve(view_, entry);
        try {
            copy_in(entry, load->slot, copy_stream);
            device_->event_record(load->done, copy_stream);
        } catch (...) {  // its event says done from an earlier round: it must not be published
            clock_release(view_, load->slot);
            load->slot = -1;
            throw;
        }
    }
    return static_cast<int>(plan.size());
}

void ExpertCache::publish(Load& load, std::vector<std::int32_t>* published) {
    const int entry = clock_publish(view_, load.slot);
    load.slot = -1;
    if (entry >= 0 && published) published->push_back(entry);
}

int ExpertCache::poll(std::vector<std::int32_t>* published) {
    int remaining = 0;
    for (Load& load : loads_) {
        if (load.slot < 0) continue;
        if (device_->event_query(load.done)) {
            publish(load, published);
        } else {
            ++remaining;
        }
    }
    return remaining;
}

void* ExpertCache::device_block() {
    if (!device_block_) device_block_ = device_->alloc(state_bytes());
    return device_block_;
}

void ExpertCache::upload(StreamHandle stream) {
    device_->copy_async(device_block(), block_.data(), state_bytes(), stream);
    device_->stream_synchronize(stream);  // the host may change its copy right after
}

void ExpertCache::download(StreamHandle stream) {
    device_->copy_async(block_.data(), device_block(), state_bytes(), stream);
    device_->stream_synchronize(stream);
}

}  // namespace glm53
