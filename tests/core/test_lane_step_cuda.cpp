// The GPU's end of the CPU lane, on a GPU: random jobs published by a kernel, computed by the lane, added by a kernel.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "cpu/lane.h"
#include "cpu/moe.h"
#include "cuda/lane_step.h"
#include "memory/host_arena.h"
#include "small_experts.h"

using namespace glm53;
using namespace glm53::test;
using namespace std::chrono_literals;
using cpu::CpuLane;
using cpu::LaneVerdict;

namespace {

constexpr int kExperts = 5, kTopK = 3, kDiverted = 1 << 20;

// A buffer of the device with a host image.
template <class T>
class Both {
  public:
    Both(std::shared_ptr<Device> device, size_t count)
        : host(count), device_(std::move(device)), at_(device_->alloc(count * sizeof(T))) {}
    ~Both() { device_->free(at_); }
    Both(const Both&) = delete;
    Both& operator=(const Both&) = delete;

    T* at() const { return static_cast<T*>(at_); }
    void to_device() { copy(at_, host.data()); }
    void to_host() { copy(host.data(), at_); }

    std::vector<T> host;

  private:
    void copy(void* to, const void* from) {
        device_->copy_async(to, from, host.size() * sizeof(T), nullptr);
        device_->stream_synchronize(nullptr);
    }
    std::shared_ptr<Device> device_;
    void* at_;
};

struct World {
    std::shared_ptr<Device> device = make_cuda_device(0);
    Layer layer{kExperts, 3};
    HostArena arena{cpu::lane_block_bytes(kHidden), "CPU lane", device};
    HostArena word{4096, "status", device};
    Both<LaneDeviceState> state{device, 1};
    Both<std::int64_t> picks{device, 8 * kTopK};
    Both<std::int32_t> on_cpu{device, 8 * kTopK};
    Both<std::uint16_t> weights{device, 8 * kTopK}, x{device, 8 * kHidden};
    Both<float> out{device, 8 * kHidden};
    std::mt19937 random{3};

    World() { state.to_device(); }
    LaneStepView view() {
        return {arena.device_address(), kHidden, state.at(), static_cast<std::uint32_t*>(word.device_address()),
                4'000'000'000};
    }
    std::uint32_t status() { return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(word.data())).load(); }

    // Fills a step's inputs, runs publish and add, and brings everything back.
    void step(int rows, bool any) {
        std::normal_distribution<float> normal;
        for (auto& pick : picks.host) pick = static_cast<std::int64_t>(random() % kExperts);
        for (auto& on : on_cpu.host) on = any && random() % 2;
        for (auto& weight : weights.host) weight = float_to_half(normal(random));
        for (auto& value : x.host) value = float_to_half(normal(random));
        for (auto& value : out.host) value = normal(random);
        before = out.host;
        chosen = picks.host;
        picks.to_device();
        on_cpu.to_device();
        weights.to_device();
        x.to_device();
        out.to_device();
        launch_lane_publish(view(), {0, rows, kTopK, picks.at(), on_cpu.at(), weights.at(), x.at(), kDiverted},
                            nullptr);
        launch_lane_add(view(), rows, out.at(), nullptr);
        out.to_host();
        picks.to_host();
    }
    // before + what CpuMoe gives for the picks that went to the CPU.
    std::vector<float> expected(cpu::CpuMoe& moe, int rows) const {
        std::vector<std::int64_t> here(chosen.begin(), chosen.begin() + rows * kTopK);
        std::vector<float> w, in, sum(static_cast<size_t>(rows * kHidden));
        for (size_t i = 0; i < here.size(); ++i) {
            w.push_back(half_to_float(weights.host[i]));
            if (!on_cpu.host[i]) here[i] = cpu::kSkippedPick;
        }
        for (int i = 0; i < rows * kHidden; ++i) in.push_back(half_to_float(x.host[static_cast<size_t>(i)]));
        moe.forward(layer.table, {in.data(), here.data(), w.data(), sum.data(), rows, kTopK, true});
        std::vector<float> all = before;
        for (size_t i = 0; i < sum.size(); ++i) all[i] += sum[i];
        return all;
    }

    std::vector<float> before;
    std::vector<std::int64_t> chosen;
};

}  // namespace

TEST_CASE("random steps: the sum is CpuMoe's, the CPU's picks are diverted, others untouched") {
    World world;
    cpu::LaneOptions options;
    options.threads = 2;
    CpuLane lane({&world.layer.table}, {world.arena.data(), world.arena.bytes()}, options);
    cpu::CpuMoe moe(2, {}, "auto");
    std::uint64_t jobs = 0;
    for (int i = 0; i < 300; ++i) {
        const int rows = 1 + static_cast<int>(world.random() % 8);
        world.step(rows, i % 5 != 0);
        bool any = false;
        for (int p = 0; p < rows * kTopK; ++p) {
            const auto at = static_cast<size_t>(p);
            any |= world.on_cpu.host[at] != 0;
            REQUIRE(world.picks.host[at] == (world.on_cpu.host[at] ? kDiverted : world.chosen[at]));
        }
        jobs += any;
        REQUIRE(world.out.host == world.expected(moe, rows));
    }
    CHECK(lane.stats().jobs == jobs);
    CHECK(world.status() == 0);
}

TEST_CASE("a stalled worker: the host reads why, nothing is added, later picks stay on the GPU") {
    World world;
    std::atomic<bool> release{false};
    cpu::LaneOptions options;
    options.threads = 2;
    options.limit = 300ms;
    options.on_job = [&](int worker, std::uint32_t job) {
        while (worker == 1 && job == 2 && !release) std::this_thread::sleep_for(1ms);
    };
    CpuLane lane({&world.layer.table}, {world.arena.data(), world.arena.bytes()}, options);
    int steps = 0;
    while (world.status() == 0 && steps < 20) {
        world.step(8, true);
        ++steps;
    }
    CHECK(world.status() == static_cast<std::uint32_t>(LaneVerdict::kStalled));
    CHECK(world.out.host == world.before);
    world.step(8, true);
    CHECK(world.picks.host == world.chosen);
    CHECK(world.out.host == world.before);
    release = true;
}
