// Two device buffers through which a prefill's experts pass one layer ahead of the computation.
//
// States of a buffer
//   Free     nobody's; its last user may still be running on the device          release, cancel, construction
//   Filling  belongs to `layer`, copies are being queued on the copy stream       begin
//   Ready    all its copies are queued and `filled` is recorded after them        commit
//   InUse    the compute stream was told to wait for `filled`                     acquire
//
// Ordering. (1) A kernel of layer L never reads bytes that have not arrived: commit records `filled` behind the copies
// on the copy stream, and acquire makes the compute stream wait for it before the kernels of L are queued there. (2) A
// copy for layer L + 2 never overwrites bytes that L still reads: release records `used` behind L's kernels on the
// compute stream, and the next begin makes the copy stream wait for it before a copy is queued. The two events are the
// buffer's own and are recorded again only in the next round, after the waits on them were queued, so no wait can see a
// later record. The host never blocks: it runs ahead, at most until begin finds no Free buffer, which is the caller's
// order of calls, not time.
//
// Threads  one host thread, the one that queues the forward pass.
// Costs    2 x bytes of device memory; a layer costs its copies, two records and two waits.
#pragma once
#include <array>
#include <cstddef>
#include <memory>
#include <stdexcept>

#include "device/device.h"

namespace glm53 {

struct StagingError : std::logic_error {
    using std::logic_error::logic_error;
};

enum class StagingState : int { Free = 0, Filling = 1, Ready = 2, InUse = 3 };

class StagingBuffers {
  public:
    static constexpr int kBuffers = 2;
    static constexpr std::size_t kPieceAlign = 256;

    // Owns 2 x bytes_each of device memory, or borrows `memory` (2 x bytes_each, which outlives this object).
    StagingBuffers(std::shared_ptr<Device> device, std::size_t bytes_each, void* memory = nullptr);
    // The caller has made sure that no work that uses the buffers is in flight.
    ~StagingBuffers();
    StagingBuffers(const StagingBuffers&) = delete;
    StagingBuffers& operator=(const StagingBuffers&) = delete;

    // Free -> Filling for `layer`; false when no buffer is free. StagingError when the layer has one already.
    bool begin(int layer, StreamHandle copy_stream);
    // Queues a copy into the layer's buffer; returns where the bytes will be, or nullptr with nothing queued when the
    // buffer has no room left for them (they are then read at home).
    void* copy(int layer, const void* src, std::size_t bytes);
    void commit(int layer);  // Filling -> Ready
    // Ready -> InUse: `compute_stream` waits for the copies.
    void acquire(int layer, StreamHandle compute_stream);
    // InUse -> Free: what was queued on `compute_stream` so far is the last use.
    void release(int layer, StreamHandle compute_stream);
    // Filling or Ready -> Free: a forward pass was given up. The copies already queued still run; the next begin's
    // copies come behind them.
    void cancel(int layer);

    StagingState state(int layer) const;  // Free when the layer has no buffer
    bool arrived(int layer) const;        // its copies are done; never blocks
    std::size_t bytes_each() const { return bytes_each_; }

  private:
    struct Buffer {
        StagingState state = StagingState::Free;
        int layer = -1;
        char* memory = nullptr;
        std::size_t filled_bytes = 0;
        StreamHandle copy_stream = nullptr;
        EventHandle filled = nullptr;
        EventHandle used = nullptr;
    };

    int find(int layer) const;  // index of the layer's buffer, or -1
    Buffer& expect(int layer, StagingState wanted, const char* call);
    void destroy() noexcept;

    const std::shared_ptr<Device> device_;
    const std::size_t bytes_each_;
    void* owned_ = nullptr;
    std::array<Buffer, kBuffers> buffers_;
    int next_ = 0;  // the buffer that has been free longest: its last reader is the furthest along
};

}  // namespace glm53
