// StagingBuffers: the two ordering claims of its header, on a host device that holds copies back.
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include "memory/staging.h"

using namespace glm53;

namespace {

const StreamHandle kCopy = reinterpret_cast<StreamHandle>(1), kCompute = reinterpret_cast<StreamHandle>(2);

// "Kernels" of a layer: copies on the compute stream out of the buffer into a result.
struct Layers {
    std::vector<char> home[4], result[4];
    Layers() {
        for (int l = 0; l < 4; ++l) {
            home[l].assign(256, static_cast<char>('a' + l));
            result[l].assign(256, '-');
        }
    }
};

}  // namespace

TEST_CASE("a layer's kernels wait for its copies; the copies of layer + 2 wait for those kernels") {
    const auto device = make_host_device();
    StagingBuffers staging(device, 512);
    Layers layers;
    device->defer(true);
    void* at[4] = {};
    for (int layer = 0; layer < 4; ++layer) {
        REQUIRE(staging.begin(layer, kCopy));
        at[layer] = staging.copy(layer, layers.home[layer].data(), 256);
        staging.commit(layer);
        staging.acquire(layer, kCompute);
        device->copy_async(layers.result[layer].data(), at[layer], 256, kCompute);
        staging.release(layer, kCompute);
    }
    CHECK(at[0] == at[2]);
    CHECK(at[1] == at[3]);
    CHECK(at[0] != at[1]);

    SUBCASE("compute first: it stops at once") {
        CHECK_FALSE(device->step(kCompute));
        CHECK(layers.result[0][0] == '-');
    }
    SUBCASE("copies first: they stop before overwriting layer 0's buffer") {
        while (device->step(kCopy)) {
        }
        CHECK(static_cast<char*>(at[0])[0] == 'a');
        CHECK(static_cast<char*>(at[1])[0] == 'b');
        // The kernels of layer 0 finish, and only then layer 2's copy may run.
        CHECK(device->step(kCompute));  // wait for the copies
        CHECK(device->step(kCompute));  // the kernel
        CHECK_FALSE(device->step(kCopy));
        CHECK(device->step(kCompute));  // records `used`
        while (device->step(kCopy)) {
        }
        CHECK(static_cast<char*>(at[2])[0] == 'c');
        CHECK(static_cast<char*>(at[3])[0] == 'b');
    }
    device->run_all();
    CHECK(device->pending(kCopy) + device->pending(kCompute) == 0);
    for (int layer = 0; layer < 4; ++layer) CHECK(layers.result[layer] == layers.home[layer]);
}

TEST_CASE("states follow the calls, and no call is taken out of order") {
    const auto device = make_host_device();
    StagingBuffers staging(device, 512);
    const std::vector<char> bytes(600, 'x');
    CHECK(staging.state(7) == StagingState::Free);
    CHECK_THROWS_WITH_AS(staging.commit(7), "staging commit: layer 7 is Free, not Filling", StagingError);
    CHECK(staging.begin(7, kCopy));
    CHECK(staging.state(7) == StagingState::Filling);
    CHECK_THROWS_AS(staging.begin(7, kCopy), StagingError);
    CHECK_THROWS_AS(staging.acquire(7, kCompute), StagingError);
    CHECK(staging.begin(8, kCopy));
    CHECK_FALSE(staging.begin(9, kCopy));  // both taken

    device->defer(true);
    CHECK(staging.copy(7, bytes.data(), 1) != nullptr);
    const void* second = staging.copy(7, bytes.data(), 256);  // at 256, after alignment
    CHECK(second != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(second) % 256 == 0);
    CHECK(staging.copy(7, bytes.data(), 1) == nullptr);  // full
    CHECK(device->pending(kCopy) == 2);                  // nothing queued for that one
    CHECK_FALSE(staging.arrived(7));
    staging.commit(7);
    CHECK(staging.state(7) == StagingState::Ready);
    CHECK_THROWS_AS(staging.copy(7, bytes.data(), 1), StagingError);
    CHECK_FALSE(staging.arrived(7));
    device->run_all();
    CHECK(staging.arrived(7));
    staging.acquire(7, kCompute);
    CHECK(staging.state(7) == StagingState::InUse);
    CHECK_THROWS_AS(staging.cancel(7), StagingError);
    staging.release(7, kCompute);
    CHECK(staging.state(7) == StagingState::Free);
    CHECK_THROWS_AS(staging.release(7, kCompute), StagingError);
    CHECK(staging.begin(9, kCopy));
}

TEST_CASE("a cancelled layer's late copies never land in the next layer's bytes") {
    const auto device = make_host_device();
    StagingBuffers staging(device, 256);
    const StreamHandle other = reinterpret_cast<StreamHandle>(3);
    const std::vector<char> stale(256, 's'), fresh(256, 'f');
    std::vector<char> result(256, '-');
    device->defer(true);
    REQUIRE(staging.begin(0, kCopy));
    const void* at = staging.copy(0, stale.data(), 256);
    SUBCASE("while filling") {}
    SUBCASE("when ready") {
        staging.commit(0);
    }
    REQUIRE(staging.begin(5, kCopy));  // keeps the second buffer
    staging.cancel(0);
    REQUIRE(staging.begin(1, other));  // the same buffer, another copy stream
    CHECK(staging.copy(1, fresh.data(), 256) == at);
    staging.commit(1);
    staging.acquire(1, kCompute);
    device->copy_async(result.data(), at, 256, kCompute);
    staging.release(1, kCompute);
    while (device->step(other) || device->step(kCompute)) {
    }
    CHECK(result[0] == '-');  // held until the stale copy is through
    device->run_all();
    CHECK(result == fresh);
}

TEST_CASE("memory is owned and freed, or borrowed and left alone") {
    const auto device = make_host_device(10'000);
    {
        const StagingBuffers owned(device, 4096);
        CHECK(device->allocated_bytes() == 8192);
        CHECK_THROWS_AS(StagingBuffers(device, 4096), DeviceFailure);
    }
    CHECK(device->allocated_bytes() == 0);
    void* memory = device->alloc(512);
    {
        StagingBuffers borrowed(device, 256, memory);
        borrowed.begin(0, kCopy);
        const char byte = 'x';
        CHECK(borrowed.copy(0, &byte, 1) == memory);
        borrowed.cancel(0);
    }
    CHECK(device->allocated_bytes() == 512);
    device->free(memory);
    CHECK_THROWS_AS(StagingBuffers(device, 100), std::invalid_argument);
    CHECK_THROWS_AS(StagingBuffers(device, 0), std::invalid_argument);
}
