// The only seam to a GPU: page-locking, device memory, asynchronous copies and events, over plain addresses.
//
// Two implementations: make_host_device() copies with memcpy and can hold copies back, so that arenas, staging and the
// expert cache are tested in full on any machine; make_cuda_device() is the GPU (in a CPU build it throws).
//
// States    a host range is unpinned -> pinned (pin) -> unpinned (unpin). An event is idle -> recorded -> done; a new
//           record starts over. Copies on one stream complete in order; streams are unordered but for stream_wait.
// Threads   every call may come from any thread; pins are kept under one mutex. Nothing synchronises but event_wait,
//           stream_synchronize and free.
// Costs     pin: about 0.13 s/GiB on 4 KiB pages, 0.03 with huge pages, once per load. copy_async: one look-up of the
//           pins and one launch a piece; a copy that crosses a pin chunk is split, for drivers refuse a range
//           that spans two registrations.
// Errors    DeviceFailure with the call, the bytes asked and the driver's name and text. unpin, free and event_destroy
//           never throw: they run in destructors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "common/error.h"

namespace glm53 {

using StreamHandle = void*;  // cudaStream_t, or any tag on the host device; nullptr is the default stream
using EventHandle = void*;   // from Device::event_create

inline constexpr std::size_t kPinChunkBytes = std::size_t{1} << 30;  // one registration; single huge ones fail

class Device {
  public:
    virtual ~Device() = default;
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    virtual bool is_cuda() const = 0;

    // Page-locks [address, address + bytes), mapped for the device, in chunks; returns the device's alias of `address`
    // (nullptr for 0 bytes, which is no error). All or nothing: on a failure the chunks already locked are released
    // before DeviceFailure is thrown. A range that overlaps a pinned one is refused.
    void* pin(void* address, std::size_t bytes);
    // Undoes pin(address, ...); an address that was not pinned is ignored.
    void unpin(void* address) noexcept;
    std::size_t pinned_bytes() const;

    virtual void* alloc(std::size_t bytes) = 0;  // 256-byte aligned at least; nullptr for 0 bytes
    virtual void free(void* address) noexcept = 0;

    // Any direction (host, pinned host, device), told from the addresses. The caller keeps both sides alive until an
    // event recorded after it on `stream` is done.
    void copy_async(void* dst, const void* src, std::size_t bytes, StreamHandle stream);

    virtual EventHandle event_create() = 0;
    virtual void event_destroy(EventHandle event) noexcept = 0;
    virtual void event_record(EventHandle event, StreamHandle stream) = 0;
    virtual bool event_query(EventHandle event) = 0;                       // true when done, or never recorded
    virtual void event_wait(EventHandle event) = 0;                        // blocks the calling thread
    virtual void stream_wait(StreamHandle stream, EventHandle event) = 0;  // later work on `stream` waits for `event`
    virtual void stream_synchronize(StreamHandle stream) = 0;

  protected:
    explicit Device(std::size_t pin_chunk_bytes);

    virtual void* pin_chunk(void* address, std::size_t bytes) = 0;  // returns the device alias
    virtual void unpin_chunk(void* address) noexcept = 0;
    virtual void copy_piece(void* dst, const void* src, std::size_t bytes, StreamHandle stream) = 0;

  private:
    void release_chunks(void* address, std::size_t bytes) noexcept;
    std::size_t piece_bytes(const void* address, std::size_t bytes) const;

    const std::size_t pin_chunk_bytes_;
    mutable std::mutex pins_mutex_;
    std::map<std::uintptr_t, std::size_t> pins_;  // address -> bytes
    std::size_t pinned_bytes_ = 0;
};

// The host device, with the controls tests need. Completion is immediate unless defer(true): copies and records then
// queue per stream until step() or run_all() executes them, so a test can look at the world half-way through.
class HostDevice : public Device {
  public:
    // Makes the n-th next pin chunk (0 = the next one) fail once; negative: none.
    virtual void fail_pin_after(int chunks) = 0;
    virtual void fail_next_alloc() = 0;
    // The same as fail_pin_after for copies; one that fails is not queued.
    virtual void fail_copy_after(int copies) = 0;
    virtual void defer(bool on) = 0;  // switching it off runs what is queued
    // Executes the oldest runnable operation of `stream`; false if none was runnable.
    virtual bool step(StreamHandle stream) = 0;
    // Executes everything that can run, on all streams; returns how many operations ran.
    virtual std::size_t run_all() = 0;
    virtual std::size_t pending(StreamHandle stream) const = 0;
    virtual std::size_t allocated_bytes() const = 0;
    virtual std::size_t pin_chunks() const = 0;

  protected:
    using Device::Device;
};

std::shared_ptr<HostDevice> make_host_device(std::uint64_t total_bytes = std::uint64_t{1} << 34,
                                             std::size_t pin_chunk_bytes = kPinChunkBytes);

// Throws DeviceFailure in a build without CUDA (naming how to get one), without a driver, or for a bad index.
std::shared_ptr<Device> make_cuda_device(int index);

}  // namespace glm53
