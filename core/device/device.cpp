#include "device/device.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace glm53 {

Device::Device(std::size_t pin_chunk_bytes) : pin_chunk_bytes_(pin_chunk_bytes) {
    if (pin_chunk_bytes == 0) throw std::invalid_argument("Device: a pin chunk must have at least 1 byte");
}

void* Device::pin(void* address, std::size_t bytes) {
    if (bytes == 0) return nullptr;
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(pins_mutex_);
    const auto after = pins_.lower_bound(begin);
    const bool overlaps_next = after != pins_.end() && after->first < begin + bytes;
    const bool overlaps_previous = after != pins_.begin() && std::prev(after)->first + std::prev(after)->second > begin;
    if (overlaps_next || overlaps_previous) {
        throw DeviceFailure("pin of " + std::to_string(bytes) + " bytes overlaps a range that is pinned already");
    }
    char* alias = nullptr;
    std::size_t done = 0;
    try {
        while (done < bytes) {
            char* chunk = static_cast<char*>(address) + done;
            auto* chunk_alias = static_cast<char*>(pin_chunk(chunk, std::min(pin_chunk_bytes_, bytes - done)));
            const std::size_t before = done;
            done += std::min(pin_chunk_bytes_, bytes - done);
            if (before == 0) alias = chunk_alias;
            if (chunk_alias != alias + before) {
                throw DeviceFailure("pin: the device's aliases of neighbouring chunks are not contiguous");
            }
        }
        pins_.emplace(begin, bytes);
    } catch (...) {
        release_chunks(address, done);
        throw;
    }
    pinned_bytes_ += bytes;
    return alias;
}

void Device::unpin(void* address) noexcept {
    const std::lock_guard lock(pins_mutex_);
    const auto pin = pins_.find(reinterpret_cast<std::uintptr_t>(address));
    if (pin == pins_.end()) return;
    release_chunks(address, pin->second);
    pinned_bytes_ -= pin->second;
    pins_.erase(pin);
}

void Device::release_chunks(void* address, std::size_t bytes) noexcept {
    for (std::size_t chunk = 0; chunk < bytes; chunk += pin_chunk_bytes_) {
        unpin_chunk(static_cast<char*>(address) + chunk);
    }
}

std::size_t Device::pinned_bytes() const {
    const std::lock_guard lock(pins_mutex_);
    return pinned_bytes_;
}

// How much of a copy of `bytes` from or to `address` stays inside one registration. Under unified
// addressing a pinned range's alias is its host address.
std::size_t Device::piece_bytes(const void* address, std::size_t bytes) const {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(pins_mutex_);
    auto pin = pins_.upper_bound(at);
    if (pin == pins_.begin()) return bytes;
    --pin;
    const std::size_t offset = at - pin->first;
    if (offset >= pin->second) return bytes;
    return std::min(bytes, pin_chunk_bytes_ - offset % pin_chunk_bytes_);
}

void Device::copy_async(void* dst, const void* src, std::size_t bytes, StreamHandle stream) {
    std::size_t done = 0;
    while (done < bytes) {
        char* to = static_cast<char*>(dst) + done;
        const char* from = static_cast<const char*>(src) + done;
        const std::size_t piece = std::min(piece_bytes(to, bytes - done), piece_bytes(from, bytes - done));
        copy_piece(to, from, piece, stream);
        done += piece;
    }
}

}  // namespace glm53
