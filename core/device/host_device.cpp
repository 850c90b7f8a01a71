// The host device: memcpy with completion that tests can hold back. One mutex guards everything below.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <set>
#include <unordered_map>
#include <utility>

#include "device/device.h"

namespace glm53 {
namespace {

struct Event {
    std::uint64_t recorded = 0;  // number of the newest record, 0: never recorded
    std::uint64_t done = 0;      // number of the newest record that completed
};

struct Operation {
    enum class Kind { Copy, Record, Wait } kind = Kind::Copy;
    void* dst = nullptr;
    const void* src = nullptr;
    std::size_t bytes = 0;
    std::shared_ptr<Event> event;
    std::uint64_t record = 0;
};

class SteppableHostDevice final : public HostDevice {
  public:
    SteppableHostDevice(std::uint64_t total_bytes, std::size_t pin_chunk_bytes)
        : HostDevice(pin_chunk_bytes), total_bytes_(total_bytes) {}

    ~SteppableHostDevice() override {
        for (const auto& [address, bytes] : allocations_) std::free(address);
    }

    bool is_cuda() const override { return false; }

    void* alloc(std::size_t bytes) override {
        if (bytes == 0) return nullptr;
        const std::lock_guard lock(mutex_);
        const std::uint64_t free_bytes = total_bytes_ - allocated_;
        const bool fail = std::exchange(fail_next_alloc_, false) || bytes > free_bytes;
        constexpr std::size_t kAlign = 256;
        void* address = fail ? nullptr : std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
        if (!address) {
            throw DeviceFailure("host device: alloc of " + std::to_string(bytes) + " bytes failed, " +
                                std::to_string(free_bytes) + " bytes free");
        }
        allocations_.emplace(address, bytes);
        allocated_ += bytes;
        return address;
    }

    void free(void* address) noexcept override {
        const std::lock_guard lock(mutex_);
        const auto it = allocations_.find(address);
        if (it == allocations_.end()) return;
        run_all_locked();  // as cudaFree: what is in flight still uses it
        allocated_ -= it->second;
        allocations_.erase(it);
        std::free(address);
    }

    EventHandle event_create() override {
        const std::lock_guard lock(mutex_);
        auto event = std::make_shared<Event>();
        events_.emplace(event.get(), event);
        return event.get();
    }

    void event_destroy(EventHandle event) noexcept override {
        const std::lock_guard lock(mutex_);
        events_.erase(event);
    }

    void event_record(EventHandle event, StreamHandle stream) override {
        const std::lock_guard lock(mutex_);
        Operation op;
        op.kind = Operation::Kind::Record;
        op.event = find(event);
        op.record = ++op.event->recorded;
        submit(std::move(op), stream);
    }

    bool event_query(EventHandle event) override {
        const std::lock_guard lock(mutex_);
        const auto e = find(event);
        return e->done >= e->recorded;
    }

    void event_wait(EventHandle event) override {
        const std::lock_guard lock(mutex_);
        const auto e = find(event);
        run_all_locked();
        if (e->done < e->recorded) throw DeviceFailure("host device: event_wait would never return");
    }

    void stream_wait(StreamHandle stream, EventHandle event) override {
        const std::lock_guard lock(mutex_);
        Operation op;
        op.kind = Operation::Kind::Wait;
        op.event = find(event);
        op.record = op.event->recorded;
        submit(std::move(op), stream);
    }

    void stream_synchronize(StreamHandle stream) override {
        const std::lock_guard lock(mutex_);
        std::deque<Operation>& queue = queues_[stream];
        while (step_locked(queue)) {
        }
        if (!queue.empty()) run_all_locked();  // it waits for another stream; else those stay held back
        if (!queue.empty()) throw DeviceFailure("host device: stream_synchronize would never return");
    }

    void fail_pin_after(int chunks) override {
        const std::lock_guard lock(mutex_);
        fail_pin_after_ = chunks;
    }

    void fail_next_alloc() override {
        const std::lock_guard lock(mutex_);
        fail_next_alloc_ = true;
    }

    void fail_copy_after(int copies) override {
        const std::lock_guard lock(mutex_);
        fail_copy_after_ = copies;
    }

    void defer(bool on) override {
        const std::lock_guard lock(mutex_);
        deferred_ = on;
        if (!on) run_all_locked();
    }

    bool step(StreamHandle stream) override {
        const std::lock_guard lock(mutex_);
        return step_locked(queues_[stream]);
    }

    std::size_t run_all() override {
        const std::lock_guard lock(mutex_);
        return run_all_locked();
    }

    std::size_t pending(StreamHandle stream) const override {
        const std::lock_guard lock(mutex_);
        const auto it = queues_.find(stream);
        return it == queues_.end() ? 0 : it->second.size();
    }

    std::size_t allocated_bytes() const override {
        const std::lock_guard lock(mutex_);
        return allocated_;
    }

    std::size_t pin_chunks() const override {
        const std::lock_guard lock(mutex_);
        return chunks_.size();
    }

  protected:
    void* pin_chunk(void* address, std::size_t bytes) override {
        const std::lock_guard lock(mutex_);
        if (fail_pin_after_ >= 0 && fail_pin_after_-- == 0) {
            throw DeviceFailure("host device: page-locking " + std::to_string(bytes) + " bytes failed as asked");
        }
        chunks_.insert(address);
        return address;
    }

    void unpin_chunk(void* address) noexcept override {
        const std::lock_guard lock(mutex_);
        chunks_.erase(address);
    }

    void copy_piece(void* dst, const void* src, std::size_t bytes, StreamHandle stream) override {
        const std::lock_guard lock(mutex_);
        if (fail_copy_after_ >= 0 && fail_copy_after_-- == 0) {
            throw DeviceFailure("host device: copying " + std::to_string(bytes) + " bytes failed as asked");
        }
        Operation op;
        op.kind = Operation::Kind::Copy;
        op.dst = dst;
        op.src = src;
        op.bytes = bytes;
        submit(std::move(op), stream);
    }

  private:
    std::shared_ptr<Event> find(EventHandle event) const {
        const auto it = events_.find(event);
        if (it == events_.end()) throw DeviceFailure("host device: no such event");
        return it->second;
    }

    void submit(Operation op, StreamHandle stream) {
        queues_[stream].push_back(std::move(op));
        if (!deferred_) run_all_locked();
    }

    static bool step_locked(std::deque<Operation>& queue) {
        if (queue.empty()) return false;
        const Operation& op = queue.front();
        if (op.kind == Operation::Kind::Wait && op.event->done < op.record) return false;
        if (op.kind == Operation::Kind::Copy) std::memmove(op.dst, op.src, op.bytes);
        if (op.kind == Operation::Kind::Record) op.event->done = std::max(op.event->done, op.record);
        queue.pop_front();
        return true;
    }

    std::size_t run_all_locked() {
        std::size_t total = 0;
        for (std::size_t before = total;; before = total) {
            for (auto& [stream, queue] : queues_) {
                while (step_locked(queue)) ++total;
            }
            if (total == before) return total;
        }
    }

    const std::uint64_t total_bytes_;
    mutable std::mutex mutex_;
    bool deferred_ = false, fail_next_alloc_ = false;
    int fail_pin_after_ = -1, fail_copy_after_ = -1;
    std::size_t allocated_ = 0;
    std::unordered_map<void*, std::size_t> allocations_;
    std::unordered_map<EventHandle, std::shared_ptr<Event>> events_;
    std::unordered_map<StreamHandle, std::deque<Operation>> queues_;
    std::set<void*> chunks_;
};

}  // namespace

std::shared_ptr<HostDevice> make_host_device(std::uint64_t total_bytes, std::size_t pin_chunk_bytes) {
    return std::make_shared<SteppableHostDevice>(total_bytes, pin_chunk_bytes);
}

}  // namespace glm53
