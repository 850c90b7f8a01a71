#include "memory/staging.h"

#include <string>

#include "common/bytes.h"

namespace glm53 {
namespace {

const char* name_of(StagingState state) {
    static constexpr const char* kNames[] = {"Free", "Filling", "Ready", "InUse"};
    return kNames[static_cast<int>(state)];
}

}  // namespace

StagingBuffers::StagingBuffers(std::shared_ptr<Device> device, std::size_t bytes_each, void* memory)
    : device_(std::move(device)), bytes_each_(bytes_each) {
    if (bytes_each == 0 || bytes_each % kPieceAlign) {
        throw std::invalid_argument("StagingBuffers: bytes_each is " + std::to_string(bytes_each) +
                                    ", a positive multiple of 256 is needed");
    }
    try {
        if (!memory) memory = owned_ = device_->alloc(kBuffers * bytes_each);
        for (int i = 0; i < kBuffers; ++i) {
            buffers_[i].memory = static_cast<char*>(memory) + i * bytes_each;
            buffers_[i].filled = device_->event_create();
            buffers_[i].used = device_->event_create();
        }
    } catch (...) {
        destroy();
        throw;
    }
}

StagingBuffers::~StagingBuffers() {
    destroy();
}

void StagingBuffers::destroy() noexcept {
    for (Buffer& buffer : buffers_) {
        if (buffer.filled) device_->event_destroy(buffer.filled);
        if (buffer.used) device_->event_destroy(buffer.used);
    }
    if (owned_) device_->free(owned_);
}

int StagingBuffers::find(int layer) const {
    for (int i = 0; i < kBuffers; ++i) {
        if (buffers_[i].state != StagingState::Free && buffers_[i].layer == layer) return i;
    }
    return -1;
}

StagingBuffers::Buffer& StagingBuffers::expect(int layer, StagingState wanted, const char* call) {
    if (state(layer) != wanted) {
        throw StagingError(std::string("staging ") + call + ": layer " + std::to_string(layer) + " is " +
                           name_of(state(layer)) + ", not " + name_of(wanted));
    }
    return buffers_[find(layer)];
}

bool StagingBuffers::begin(int layer, StreamHandle copy_stream) {
    if (find(layer) >= 0) throw StagingError("staging begin: layer " + std::to_string(layer) + " has a buffer already");
    for (int i = 0; i < kBuffers; ++i) {
        Buffer& buffer = buffers_[(next_ + i) % kBuffers];
        if (buffer.state != StagingState::Free) continue;
        next_ = (next_ + i + 1) % kBuffers;
        device_->stream_wait(copy_stream, buffer.used);
        device_->stream_wait(copy_stream, buffer.filled);  // copies of a cancelled layer, if another stream had them
        buffer.state = StagingState::Filling;
        buffer.layer = layer;
        buffer.filled_bytes = 0;
        buffer.copy_stream = copy_stream;
        return true;
    }
    return false;
}

void* StagingBuffers::copy(int layer, const void* src, std::size_t bytes) {
    Buffer& buffer = expect(layer, StagingState::Filling, "copy");
    const std::size_t at = align_up(buffer.filled_bytes, kPieceAlign);
    if (at > bytes_each_ || bytes > bytes_each_ - at) return nullptr;
    device_->copy_async(buffer.memory + at, src, bytes, buffer.copy_stream);
    buffer.filled_bytes = at + bytes;
    return buffer.memory + at;
}

void StagingBuffers::commit(int layer) {
    Buffer& buffer = expect(layer, StagingState::Filling, "commit");
    device_->event_record(buffer.filled, buffer.copy_stream);
    buffer.state = StagingState::Ready;
}

void StagingBuffers::acquire(int layer, StreamHandle compute_stream) {
    Buffer& buffer = expect(layer, StagingState::Ready, "acquire");
    device_->stream_wait(compute_stream, buffer.filled);
    buffer.state = StagingState::InUse;
}

void StagingBuffers::release(int layer, StreamHandle compute_stream) {
    Buffer& buffer = expect(layer, StagingState::InUse, "release");
    device_->event_record(buffer.used, compute_stream);
    buffer.state = StagingState::Free;
    buffer.layer = -1;
}

void StagingBuffers::cancel(int layer) {
    const int index = find(layer);
    if (index < 0 || buffers_[index].state == StagingState::InUse) {
        throw StagingError("staging cancel: layer " + std::to_string(layer) + " is not Filling or Ready");
    }
    Buffer& buffer = buffers_[index];
    device_->event_record(buffer.filled, buffer.copy_stream);
    buffer.state = StagingState::Free;
    buffer.layer = -1;
}

StagingState StagingBuffers::state(int layer) const {
    const int index = find(layer);
    return index < 0 ? StagingState::Free : buffers_[index].state;
}

bool StagingBuffers::arrived(int layer) const {
    const StagingState now = state(layer);
    if (now != StagingState::Ready && now != StagingState::InUse) return false;
    return device_->event_query(buffers_[find(layer)].filled);
}

}  // namespace glm53
