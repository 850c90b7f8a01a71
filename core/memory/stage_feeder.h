// Fills staging buffers from a thread of its own, with only a few copies in the device's queue at any time.
//
// Why: copies to the device run in the order they were issued, whatever their stream. A whole layer issued at once (45
// ms on PCIe 5) would hold up every small copy that the forward pass itself makes, and with it the layer before; with
// `in_flight` pieces queued, those wait half a millisecond.
//
// States of a layer   queued (queue) -> bringing (the thread) -> brought (its copies are issued, `filled` recorded)
//                     -> in use (acquire) -> gone (release, stop)
// Ordering  `filled` is recorded before a layer counts as brought, and acquire waits for that on the host before it
//           makes the compute stream wait for the event: an event that was not recorded yet would hold up nothing.
// Threads   queue, acquire, release and stop: one thread, the one that queues the forward pass. One mutex guards the
//           staging buffers and the list; the feeding thread drops it while it waits for a copy.
// Costs     acquire blocks until all but `in_flight` of the layer's copies are done, about as long as the device would.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/device.h"
#include "memory/staging.h"

namespace glm53 {

struct StagePiece {
    const void* from = nullptr;
    std::size_t bytes = 0;
    void* at = nullptr;  // where it was brought; nullptr: no room, it is read at home
};

class StageFeeder {
  public:
    // `staging` outlives this object and is touched by nothing else meanwhile.
    StageFeeder(std::shared_ptr<Device> device, StagingBuffers& staging, StreamHandle copy_stream, int in_flight = 3);
    ~StageFeeder();  // stop
    StageFeeder(const StageFeeder&) = delete;
    StageFeeder& operator=(const StageFeeder&) = delete;

    // Takes a buffer for `layer` and starts to bring its pieces, after those queued before. StagingError when no buffer
    // is free.
    void queue(int layer, std::vector<StagePiece> pieces);
    // Waits until the layer's copies are issued and makes `compute_stream` wait for them; its pieces say where they
    // are. Rethrows what the feeding thread met.
    std::vector<StagePiece> acquire(int layer, StreamHandle compute_stream);
    void release(int layer, StreamHandle compute_stream);
    // Ends the thread and gives up every layer that is not released; what `compute_stream` has queued may still read.
    void stop(StreamHandle compute_stream) noexcept;

  private:
    struct Task {
        int layer = -1;
        std::vector<StagePiece> pieces;
        bool brought = false;
    };

    void run();
    void bring(std::unique_lock<std::mutex>& lock, Task& task);
    void throttle(std::unique_lock<std::mutex>& lock);

    const std::shared_ptr<Device> device_;
    StagingBuffers& staging_;
    const StreamHandle copy_;
    std::vector<EventHandle> issued_;  // one per piece in flight, reused in turn
    std::size_t turn_ = 0;

    std::mutex mutex_;  // everything below, and staging_
    std::condition_variable changed_;
    std::deque<std::unique_ptr<Task>> tasks_;  // not acquired yet, oldest first
    std::vector<int> in_use_;
    std::exception_ptr error_;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace glm53
