// StageFeeder on the host device: bounded depth, order, and what is left when it is stopped or fails.
#include "memory/stage_feeder.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

using namespace glm53;

namespace {

constexpr std::size_t kPiece = 256;

struct Feed {
    std::shared_ptr<HostDevice> device = make_host_device();
    std::vector<unsigned char> bytes = std::vector<unsigned char>(64 * kPiece);
    StagingBuffers staging{device, 16 * kPiece};
    int compute = 0, copy = 0;
    StageFeeder feeder{device, staging, &copy};

    Feed() {
        for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i / kPiece + 1);
    }
    ~Feed() { device->defer(false); }

    std::vector<StagePiece> pieces(int first, int count) const {
        std::vector<StagePiece> out;
        for (int i = first; i < first + count; ++i) out.push_back({bytes.data() + i * kPiece, kPiece});
        return out;
    }
    static bool right(const StagePiece& piece) { return std::memcmp(piece.at, piece.from, piece.bytes) == 0; }
};

}  // namespace

TEST_CASE("stage feeder: layers arrive in order and their bytes are right") {
    Feed f;
    f.feeder.queue(0, f.pieces(0, 10));
    f.feeder.queue(1, f.pieces(10, 16));
    CHECK_THROWS_AS(f.feeder.queue(2, f.pieces(0, 1)), StagingError);  // both buffers are taken
    for (const StagePiece& piece : f.feeder.acquire(0, &f.compute)) CHECK(Feed::right(piece));
    f.feeder.release(0, &f.compute);
    f.feeder.queue(2, f.pieces(30, 5));
    for (const StagePiece& piece : f.feeder.acquire(1, &f.compute)) CHECK(Feed::right(piece));
    for (const StagePiece& piece : f.feeder.acquire(2, &f.compute)) CHECK(Feed::right(piece));
}

TEST_CASE("stage feeder: no more than three pieces wait in the device's queue") {
    Feed f;
    f.device->defer(true);
    f.feeder.queue(0, f.pieces(0, 12));
    while (f.device->pending(&f.copy) < 4) std::this_thread::yield();  // until the feeder has done what it may
    std::atomic<bool> arrived = false;
    std::size_t most = 0;
    std::thread stepping([&] {
        while (!arrived) {
            most = std::max(most, f.device->pending(&f.copy));
            f.device->step(&f.copy);
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
    });
    CHECK(f.feeder.acquire(0, &f.compute).size() == 12);
    arrived = true;
    stepping.join();
    CHECK(most >= 4);
    CHECK(most <= 2 * 3 + 3);  // three copies with their records, the two waits of a begin, the record of a commit
}

TEST_CASE("stage feeder: what has no room is said to be at home") {
    Feed f;
    f.feeder.queue(0, f.pieces(0, 20));
    const auto pieces = f.feeder.acquire(0, &f.compute);
    for (int i = 0; i < 16; ++i) CHECK(Feed::right(pieces[i]));
    for (int i = 16; i < 20; ++i) CHECK(pieces[i].at == nullptr);
}

TEST_CASE("stage feeder: stopped half-way it leaves both buffers free") {
    Feed f;
    f.device->defer(true);
    f.feeder.queue(0, f.pieces(0, 12));
    f.feeder.queue(1, f.pieces(0, 12));
    SUBCASE("while a layer is being brought") {
        f.feeder.stop(&f.compute);
    }
    SUBCASE("with a layer in use") {
        f.device->defer(false);
        f.feeder.acquire(0, &f.compute);
        f.feeder.stop(&f.compute);
    }
    f.device->defer(false);
    f.device->run_all();
    CHECK(f.staging.state(0) == StagingState::Free);
    CHECK(f.staging.state(1) == StagingState::Free);
    f.feeder.stop(&f.compute);
}

TEST_CASE("stage feeder: layers are acquired in the order they were queued") {
    Feed f;
    CHECK_THROWS_AS(f.feeder.acquire(0, &f.compute), StagingError);
    f.feeder.queue(0, f.pieces(0, 1));
    f.feeder.queue(1, f.pieces(0, 1));
    CHECK_THROWS_AS(f.feeder.acquire(1, &f.compute), StagingError);
}
