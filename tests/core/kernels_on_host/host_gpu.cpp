#include "host_gpu.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "grid.h"

namespace glm53::test {
namespace {

constexpr std::size_t kAlign = 256;

class HostGpu final : public Device {
  public:
    HostGpu() : Device(kPinChunkBytes) {}

    bool is_cuda() const override { return true; }
    void* alloc(std::size_t bytes) override {
        return bytes ? std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign) : nullptr;
    }
    void free(void* address) noexcept override {
        synchronize();
        std::free(address);
    }
    // An event is how many of its records have not been reached; all streams are one.
    EventHandle event_create() override { return new std::atomic<int>(0); }
    void event_destroy(EventHandle event) noexcept override {
        synchronize();
        delete open(event);
    }
    void event_record(EventHandle event, StreamHandle) override {
        open(event)->fetch_add(1);
        enqueue([event] { open(event)->fetch_sub(1); });
    }
    bool event_query(EventHandle event) override { return open(event)->load() == 0; }
    void event_wait(EventHandle) override { synchronize(); }
    void stream_wait(StreamHandle, EventHandle) override {}
    void stream_synchronize(StreamHandle) override { synchronize(); }

  protected:
    void* pin_chunk(void* address, std::size_t) override { return address; }
    void unpin_chunk(void*) noexcept override { synchronize(); }
    void copy_piece(void* dst, const void* src, std::size_t bytes, StreamHandle) override {
        enqueue([=] { std::memcpy(dst, src, bytes); });
    }

  private:
    static std::atomic<int>* open(EventHandle event) { return static_cast<std::atomic<int>*>(event); }
};

}  // namespace

std::shared_ptr<Device> make_host_gpu() {
    return std::make_shared<HostGpu>();
}

}  // namespace glm53::test
