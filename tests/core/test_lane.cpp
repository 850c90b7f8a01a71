// The CPU lane: results bit for bit those of CpuMoe over thousands of ragged jobs, and what happens when workers stall,
// die or meet nonsense. Small enough for the sanitizers.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/cpu_info.h"
#include "cpu/lane.h"
#include "cpu/lane_publisher.h"
#include "cpu/moe.h"
#include "memory/host_arena.h"
#include "small_experts.h"

using namespace glm53;
using namespace glm53::test;
using namespace std::chrono_literals;
using cpu::CpuLane;
using cpu::CpuMoe;
using cpu::LaneOptions;
using cpu::LanePublisher;
using cpu::LaneVerdict;

namespace {

constexpr int kExperts = 5;

LaneOptions quick(int threads) {
    LaneOptions options;
    options.threads = threads;
    options.spin = 50us;  // more workers than cores here: let them park
    options.poll = 200us;
    options.limit = 60s;  // a busy machine is no stall
    return options;
}

// Two layers of experts and a block in an arena, as the product has them.
struct World {
    Layer first{kExperts, 3}, second{kExperts, 4};
    HostArena arena{cpu::lane_block_bytes(kHidden), "CPU lane"};

    std::vector<const ExpertTable*> tables() const { return {&first.table, &second.table}; }
    std::span<std::byte> block() const { return {arena.data(), arena.bytes()}; }
};

// Everything a job is made of, by random numbers alone.
struct Job {
    int layer, rows, top_k;
    std::vector<std::int32_t> picks;
    std::vector<float> weights, x;

    explicit Job(std::mt19937& random) {
        const auto below = [&](unsigned n) { return static_cast<int>(random() % n); };
        layer = below(2);
        rows = below(4) ? 1 + below(2) : below(cpu::kLaneRows + 1);
        top_k = below(4);
        std::normal_distribution<float> normal;
        for (int i = 0; i < rows * top_k; ++i) {
            picks.push_back(below(3) ? below(kExperts) : cpu::kSkippedPick);
            weights.push_back(normal(random));
        }
        for (int i = 0; i < rows * kHidden; ++i) x.push_back(normal(random));
    }
    cpu::LaneRequest request() const { return {layer, rows, top_k, picks.data(), weights.data(), x.data()}; }
    std::vector<float> expected(CpuMoe& moe, const World& world) const {
        const std::vector<std::int64_t> wide(picks.begin(), picks.end());
        std::vector<float> out(x.size());
        moe.forward(*world.tables()[static_cast<size_t>(layer)],
                    {x.data(), wide.data(), weights.data(), out.data(), rows, top_k, true});
        return out;
    }
};

Job one_pick(int expert) {
    std::mt19937 random(9);
    Job job(random);
    job.layer = 0;
    job.rows = job.top_k = 1;
    job.picks = {expert};
    job.weights = {1.0f};
    job.x.assign(kHidden, 0.5f);
    return job;
}

std::vector<float> result(const LanePublisher& publisher, const Job& job) {
    return {publisher.result(), publisher.result() + job.x.size()};
}

}  // namespace

TEST_CASE("thousands of random ragged jobs, bit for bit as CpuMoe") {
    const World world;
    for (const int threads : {1, 2, 5}) {
        CAPTURE(threads);
        CpuLane lane(world.tables(), world.block(), quick(threads));
        CpuMoe moe(threads == 1 ? 3 : 1, {}, "auto");
        std::uint64_t picks = 0;
        int different = 0;
        std::thread publisher_thread([&] {
            LanePublisher publisher(world.arena.data(), kHidden);
            std::mt19937 random(static_cast<unsigned>(threads));
            for (int i = 0; i < 1200; ++i) {
                const Job job(random);
                for (const std::int32_t pick : job.picks) picks += pick >= 0;
                publisher.publish(job.request());
                if (i % 7 == 0) lane.wake();  // else the watchdog does, where they have parked
                different += publisher.await(20s) != LaneVerdict::kOk;
                different += result(publisher, job) != job.expected(moe, world);
            }
        });
        publisher_thread.join();
        CHECK(different == 0);
        CHECK(lane.stats().jobs == 1200);
        CHECK(lane.stats().picks == picks);
        CHECK(lane.stats().expert_bytes == moe.stats().expert_bytes);
        CHECK(!lane.failed());
    }
}

TEST_CASE("two jobs outstanding: each has its own slot, a third is refused") {
    const World world;
    CpuLane lane(world.tables(), world.block(), quick(3));
    CpuMoe moe(3, {}, "auto");
    LanePublisher publisher(world.arena.data(), kHidden);
    std::mt19937 random(4);
    for (int i = 0; i < 100; ++i) {
        const Job a(random), b(random);
        publisher.publish(a.request());
        publisher.publish(b.request());
        REQUIRE_THROWS_AS(publisher.publish(b.request()), std::logic_error);
        REQUIRE(publisher.await(20s) == LaneVerdict::kOk);
        REQUIRE(result(publisher, a) == a.expected(moe, world));
        REQUIRE(publisher.await(20s) == LaneVerdict::kOk);
        REQUIRE(result(publisher, b) == b.expected(moe, world));
    }
}

TEST_CASE("a parked lane is found by the watchdog, or woken") {
    const World world;
    CpuLane lane(world.tables(), world.block(), quick(2));
    LanePublisher publisher(world.arena.data(), kHidden);
    for (const bool ring : {false, true}) {
        while (lane.stats().parked < 2) std::this_thread::sleep_for(1ms);
        if (ring) lane.wake();
        const Job job = one_pick(1);
        publisher.publish(job.request());
        CHECK(publisher.await(20s) == LaneVerdict::kOk);
    }
    CHECK(lane.stats().parks >= 4);
}

TEST_CASE("workers that are called while they spin go on spinning") {
    const World world;
    LaneOptions options = quick(2);
    options.spin = 400ms;
    for (int attempt = 0; attempt < 10; ++attempt) {
        const auto begin = std::chrono::steady_clock::now();
        const auto at = [&] { return std::chrono::steady_clock::now() - begin; };
        CpuLane lane(world.tables(), world.block(), options);
        std::this_thread::sleep_for(250ms);
        lane.wake();
        const bool in_time = at() < 350ms;
        std::this_thread::sleep_until(begin + 550ms);
        const auto parks = lane.stats().parks;
        if (!in_time || at() > 600ms) continue;  // this thread was late: its call, or its look, came at another time
        CHECK(parks == 0);
        return;
    }
    MESSAGE("the machine is too busy to call at a known time");
}

TEST_CASE("a bad job fails alone") {
    const World world;
    CpuLane lane(world.tables(), world.block(), quick(2));
    CpuMoe moe(2, {}, "auto");
    LanePublisher publisher(world.arena.data(), kHidden);
    const auto verdict = [&](const Job& job) {
        publisher.publish(job.request());
        return publisher.await(20s);
    };
    for (const int pick : {-2, kExperts, 1 << 30}) CHECK(verdict(one_pick(pick)) == LaneVerdict::kBadJob);
    Job elsewhere = one_pick(0);
    elsewhere.layer = 2;
    CHECK(verdict(elsewhere) == LaneVerdict::kBadJob);
    const Job good = one_pick(3);
    CHECK(verdict(good) == LaneVerdict::kOk);
    CHECK(result(publisher, good) == good.expected(moe, world));
    CHECK(lane.stats().bad_jobs == 4);
    CHECK(lane.stats().jobs == 1);
    CHECK(lane.health().verdict == LaneVerdict::kOk);
}

TEST_CASE("a worker that stalls is noticed in time; its late result is never taken") {
    const World world;
    std::atomic<bool> release{false};
    LaneOptions options = quick(3);
    options.limit = 2s;  // the first two jobs must keep it on a busy machine too
    options.on_job = [&](int worker, std::uint32_t job) {
        while (worker == 1 && job == 3 && !release) std::this_thread::sleep_for(1ms);
    };
    CpuLane lane(world.tables(), world.block(), options);
    LanePublisher publisher(world.arena.data(), kHidden);
    const Job job = one_pick(2);
    for (int i = 0; i < 2; ++i) {
        publisher.publish(job.request());
        REQUIRE(publisher.await(20s) == LaneVerdict::kOk);
    }
    publisher.publish(job.request());
    publisher.publish(job.request());  // waits behind it
    CHECK(publisher.await(20s) == LaneVerdict::kStalled);
    CHECK(publisher.await(20s) == LaneVerdict::kStalled);
    CHECK(lane.failed());
    CHECK(lane.health().job == 3);
    CHECK(lane.health().worker == 1);
    CHECK(lane.health().reason == "job 3 was not done within 2000 ms: worker 1 of 3 did not arrive");
    CHECK_THROWS_AS(publisher.publish(job.request()), std::logic_error);
    release = true;  // the worker goes on and finds the lane over
    std::this_thread::sleep_for(50ms);
    const cpu::LaneSlot slot = cpu::lane_slot(world.arena.data(), kHidden, 3);
    CHECK(cpu::lane_verdict(std::atomic_ref(slot.done->word).load(), 3) == LaneVerdict::kStalled);
    CHECK(lane.stats().jobs == 2);
}

TEST_CASE("a limit that races with the last worker: a job gets one verdict, and a kOk is a whole sum") {
    const World world;
    CpuMoe moe(2, {}, "auto");
    std::mt19937 random(8);
    LaneOptions options = quick(2);
    options.limit = 0ms;
    options.poll = 20us;
    int whole = 0, stalled = 0, different = 0, changed = 0;
    while (whole < 50 || stalled < 50) {
        LaneVerdict last = LaneVerdict::kOk;
        std::uint32_t job_number = 0;
        {
            CpuLane lane(world.tables(), world.block(), options);
            LanePublisher publisher(world.arena.data(), kHidden);
            while (last == LaneVerdict::kOk && job_number < 10) {
                const Job job(random);
                job_number = publisher.publish(job.request());
                last = publisher.await(20s);
                if (last == LaneVerdict::kOk) different += result(publisher, job) != job.expected(moe, world);
                (last == LaneVerdict::kOk ? whole : stalled) += 1;
            }
        }  // all workers have gone: what is written now stays
        const cpu::LaneSlot slot = cpu::lane_slot(world.arena.data(), kHidden, job_number);
        changed += cpu::lane_verdict(slot.done->word, job_number) != last;
        REQUIRE(stalled + whole < 100'000);
    }
    CHECK(different == 0);
    CHECK(changed == 0);
}

#if !defined(__SANITIZE_THREAD__)  // it does not follow a fork
// Runs in a process of its own, which stops itself inside a job. 0: the job was done nevertheless.
int stopped_in_a_job() {
    const World world;
    LaneOptions options = quick(2);
    options.limit = 2s;
    options.on_job = [](int worker, std::uint32_t number) {
        if (worker != 0 || number != 2) return;
        const auto begin = std::chrono::steady_clock::now();
        kill(getpid(), SIGSTOP);  // this thread may run on for a moment
        while (std::chrono::steady_clock::now() - begin < 2500ms) std::this_thread::sleep_for(1ms);
        std::this_thread::sleep_for(100ms);  // the watchdog looks while the job is not done yet
    };
    CpuLane lane(world.tables(), world.block(), options);
    LanePublisher publisher(world.arena.data(), kHidden);
    const Job job = one_pick(2);
    for (int i = 0; i < 2; ++i) {
        publisher.publish(job.request());
        if (publisher.await(20s) != LaneVerdict::kOk) return 1;
        std::this_thread::sleep_for(50ms);  // the watchdog has begun
    }
    return lane.failed() ? 1 : 0;
}

TEST_CASE("time in which the process was stopped is no worker's fault") {
    const pid_t child = fork();
    if (child == 0) {
        alarm(100);
        _exit(stopped_in_a_job());
    }
    REQUIRE(child > 0);
    int status = 0;
    REQUIRE(waitpid(child, &status, WUNTRACED) == child);
    REQUIRE(WIFSTOPPED(status));
    std::this_thread::sleep_for(3s);
    kill(child, SIGCONT);
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
}
#endif

TEST_CASE("the limit of two seconds holds with the settings as they are") {
    CHECK(LaneOptions{}.limit + 10 * LaneOptions{}.poll < 2s);
}

TEST_CASE("a worker that dies ends the lane at once, with its reason") {
    const World world;
    LaneOptions options = quick(2);
    options.limit = 60s;  // not what notices it
    options.on_job = [](int worker, std::uint32_t job) {
        if (worker == 1 && job == 2) throw std::runtime_error("out of luck");
    };
    CpuLane lane(world.tables(), world.block(), options);
    LanePublisher publisher(world.arena.data(), kHidden);
    const Job job = one_pick(0);
    publisher.publish(job.request());
    CHECK(publisher.await(20s) == LaneVerdict::kOk);
    publisher.publish(job.request());
    CHECK(publisher.await(20s) == LaneVerdict::kDied);
    CHECK(lane.health().verdict == LaneVerdict::kDied);
    CHECK(lane.health().worker == 1);
    CHECK(lane.health().reason == "worker 1 failed in job 2: out of luck");
}

TEST_CASE("a lane that is closed leaves no job without a verdict") {
    const World world;
    const Job job = one_pick(0);
    for (int i = 0; i < 20; ++i) {
        std::optional<LanePublisher> fresh;
        {
            CpuLane lane(world.tables(), world.block(), quick(2));
            fresh.emplace(world.arena.data(), kHidden);
            fresh->publish(job.request());
        }
        const LaneVerdict verdict = fresh->poll();
        CHECK((verdict == LaneVerdict::kOk || verdict == LaneVerdict::kDied));
    }
}

TEST_CASE("pinned workers, and what a lane refuses") {
    const World world;
    LaneOptions pinned;
    pinned.cpus = {allowed_cpus().front()};
    {
        CpuLane lane(world.tables(), world.block(), pinned);
        CHECK(lane.threads() == 1);
        CpuMoe moe(1, {}, "auto");
        LanePublisher publisher(world.arena.data(), kHidden);
        const Job job = one_pick(4);
        publisher.publish(job.request());
        CHECK(publisher.await(20s) == LaneVerdict::kOk);
        CHECK(result(publisher, job) == job.expected(moe, world));
    }
    const auto refuses = [&](LaneOptions options) {
        CHECK_THROWS_AS(CpuLane(world.tables(), world.block(), options), std::invalid_argument);
    };
    pinned.threads = 2;
    refuses(pinned);
    pinned.cpus = {100'000};
    pinned.threads = 0;
    refuses(pinned);
    LaneOptions negative;
    negative.threads = -1;
    refuses(negative);
    LaneOptions unknown;
    unknown.isa = "mmx";
    refuses(unknown);
    CHECK_THROWS_AS(CpuLane({}, world.block(), quick(1)), std::invalid_argument);
    CHECK_THROWS_AS(CpuLane(world.tables(), world.block().first(4096), quick(1)), std::invalid_argument);
    const ExpertTable wider(1, 2 * kHidden, kInter, 0.0f);
    CHECK_THROWS_AS(CpuLane({&world.first.table, &wider}, world.block(), quick(1)), std::invalid_argument);
    LanePublisher publisher(world.arena.data(), kHidden);
    CHECK_THROWS_AS(publisher.publish({0, 9, 1, nullptr, nullptr, nullptr}), std::invalid_argument);
    CHECK_THROWS_AS(publisher.publish({0, 8, 9, nullptr, nullptr, nullptr}), std::invalid_argument);
}

TEST_CASE("the last job of a block, also where numbers wrap") {
    HostArena arena(cpu::lane_block_bytes(kHidden), "CPU lane");
    const auto last = [&](std::uint32_t even, std::uint32_t odd) {
        cpu::lane_slot(arena.data(), kHidden, 0).job->published = even;
        cpu::lane_slot(arena.data(), kHidden, 1).job->published = odd;
        return cpu::lane_last_job(arena.data(), kHidden);
    };
    CHECK(last(0, 0) == 0);
    CHECK(last(0, 1) == 1);
    CHECK(last(2, 1) == 2);
    CHECK(last(2, 3) == 3);
    CHECK(last(0xfffffffe, 0xffffffff) == 0xffffffff);
    CHECK(last(0, 0xffffffff) == 0);
    CHECK(last(0, 1) == 1);
}
