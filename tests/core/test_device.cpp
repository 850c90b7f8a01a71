// The host device: ordering, deferred completion, pin and allocation accounting.
#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <thread>
#include <vector>

#include "device/device.h"

using namespace glm53;

namespace {
StreamHandle stream(std::uintptr_t tag) {
    return reinterpret_cast<StreamHandle>(tag);
}
}  // namespace

TEST_CASE("copies complete at once unless deferred, and in stream order when stepped") {
    const auto device = make_host_device();
    int a = 1, b = 2, out = 0;
    device->copy_async(&out, &a, sizeof out, nullptr);
    CHECK(out == 1);

    device->defer(true);
    const EventHandle event = device->event_create();
    CHECK(device->event_query(event));  // never recorded
    device->copy_async(&out, &b, sizeof out, stream(1));
    device->event_record(event, stream(1));
    CHECK(out == 1);
    CHECK_FALSE(device->event_query(event));
    CHECK(device->step(stream(1)));
    CHECK(out == 2);
    CHECK_FALSE(device->event_query(event));
    CHECK(device->step(stream(1)));
    CHECK(device->event_query(event));
    CHECK_FALSE(device->step(stream(1)));
    device->event_destroy(event);
}

TEST_CASE("a stream waits for the record that existed when it was told to wait") {
    const auto device = make_host_device();
    device->defer(true);
    const EventHandle event = device->event_create();
    int source = 7, first = 0, second = 0;
    device->copy_async(&first, &source, sizeof source, stream(1));
    device->event_record(event, stream(1));
    device->stream_wait(stream(2), event);
    device->copy_async(&second, &first, sizeof first, stream(2));
    CHECK_FALSE(device->step(stream(2)));
    CHECK(device->pending(stream(2)) == 2);
    SUBCASE("stepping") {
        CHECK(device->step(stream(1)));
        CHECK_FALSE(device->step(stream(2)));
        CHECK(device->step(stream(1)));
        device->event_record(event, stream(1));  // a later record is not waited for
        CHECK(device->step(stream(2)));
        CHECK(device->step(stream(2)));
        CHECK_FALSE(device->event_query(event));
    }
    SUBCASE("run_all crosses streams") {
        CHECK(device->run_all() == 4);
    }
    SUBCASE("synchronize") {
        device->stream_synchronize(stream(2));
    }
    CHECK(second == 7);
    device->event_destroy(event);
}

TEST_CASE("waiting for an event nothing will record is an error, not a hang") {
    const auto device = make_host_device();
    device->defer(true);
    const EventHandle a = device->event_create(), b = device->event_create();
    // Two streams that wait for each other's record.
    device->event_record(a, stream(3));
    device->run_all();
    device->event_record(b, stream(9));
    device->stream_wait(stream(1), b);
    device->event_record(a, stream(1));
    device->event_wait(a);  // runs stream 9, then 1
    CHECK(device->event_query(a));
    device->event_destroy(b);
    CHECK_THROWS_AS(device->event_query(b), DeviceFailure);
    device->event_destroy(a);
}

TEST_CASE("allocations are counted and refused past the total") {
    const auto device = make_host_device(4096);
    CHECK(device->alloc(0) == nullptr);
    void* a = device->alloc(3000);
    CHECK(reinterpret_cast<std::uintptr_t>(a) % 256 == 0);
    CHECK(device->allocated_bytes() == 3000);
    CHECK_FALSE(device->is_cuda());
    CHECK_THROWS_WITH_AS(device->alloc(2000), doctest::Contains("2000 bytes failed, 1096 bytes free"), DeviceFailure);
    device->fail_next_alloc();
    CHECK_THROWS_AS(device->alloc(1), DeviceFailure);
    void* b = device->alloc(1);
    device->free(a);
    device->free(b);
    device->free(nullptr);
    CHECK(device->allocated_bytes() == 0);
}

TEST_CASE("pinning goes in chunks and a failure releases the chunks before it") {
    const auto device = make_host_device(1 << 20, 1024);
    std::vector<char> host(5000);
    CHECK(device->pin(host.data(), 0) == nullptr);
    CHECK(device->pin_chunks() == 0);
    CHECK(device->pin(host.data(), 5000) == host.data());
    CHECK(device->pin_chunks() == 5);
    CHECK(device->pinned_bytes() == 5000);
    CHECK_THROWS_WITH_AS(device->pin(host.data() + 4000, 100), doctest::Contains("overlaps"), DeviceFailure);
    device->unpin(host.data() + 1);  // not the start of a pin: ignored
    CHECK(device->pinned_bytes() == 5000);
    device->unpin(host.data());
    device->unpin(host.data());
    CHECK(device->pin_chunks() == 0);
    CHECK(device->pinned_bytes() == 0);

    device->fail_pin_after(3);
    CHECK_THROWS_WITH_AS(device->pin(host.data(), 5000), doctest::Contains("page-locking 1024 bytes"), DeviceFailure);
    CHECK(device->pin_chunks() == 0);
    CHECK(device->pinned_bytes() == 0);
    CHECK(device->pin(host.data(), 5000) == host.data());  // the failure was one-off
    device->unpin(host.data());
}

TEST_CASE("a copy that crosses pin chunks is split at their borders, on either side") {
    const auto device = make_host_device(1 << 20, 1000);
    std::vector<char> pinned(2500), other(2500);
    for (std::size_t i = 0; i < pinned.size(); ++i) pinned[i] = static_cast<char>(i * 7);
    device->pin(pinned.data(), pinned.size());
    device->defer(true);
    device->copy_async(other.data(), pinned.data() + 900, 1200, nullptr);  // borders at 1000 and 2000
    CHECK(device->pending(nullptr) == 3);
    device->copy_async(pinned.data() + 10, other.data(), 990, nullptr);  // ends at the border
    CHECK(device->pending(nullptr) == 4);
    CHECK(device->step(nullptr));
    CHECK(std::memcmp(other.data(), pinned.data() + 900, 100) == 0);
    CHECK(other[100] == 0);
    device->run_all();
    CHECK(std::memcmp(pinned.data() + 10, other.data(), 990) == 0);
    device->unpin(pinned.data());
    device->copy_async(other.data(), pinned.data(), 2500, nullptr);
    CHECK(device->pending(nullptr) == 1);
}

TEST_CASE("threads may pin, copy and record at once") {
    const auto device = make_host_device(1 << 20, 64);
    std::vector<std::thread> threads;
    std::array<std::array<char, 256>, 4> from{}, to{};
    for (std::size_t t = 0; t < from.size(); ++t) {
        from[t].fill(static_cast<char>(t + 1));
        threads.emplace_back([&, t] {
            for (int round = 0; round < 50; ++round) {
                device->pin(from[t].data(), 256);
                const EventHandle event = device->event_create();
                device->copy_async(to[t].data(), from[t].data(), 256, stream(t));
                device->event_record(event, stream(t));
                device->event_wait(event);
                device->event_destroy(event);
                device->unpin(from[t].data());
            }
        });
    }
    for (auto& thread : threads) thread.join();
    CHECK(from == to);
    CHECK(device->pinned_bytes() == 0);
}

#ifndef GLM53_HAVE_CUDA
TEST_CASE("a CPU build refuses a CUDA device and says how to get one") {
    CHECK_THROWS_WITH_AS(make_cuda_device(2), doctest::Contains("CUDA device 2: this build"), DeviceFailure);
}
#endif
