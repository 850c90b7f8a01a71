#include <doctest/doctest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common/cpu_info.h"
#include "common/thread_pool.h"

using glm53::ThreadPool;
using namespace std::chrono_literals;

TEST_CASE("every worker runs once per job, and its writes are visible to the caller") {
    for (const int threads : {1, 2, 5}) {
        ThreadPool pool(threads);
        CHECK(pool.size() == threads);
        std::vector<int> counts(static_cast<size_t>(threads));
        for (int job = 0; job < 500; ++job) pool.run([&](int worker) { ++counts[static_cast<size_t>(worker)]; });
        for (const int count : counts) CHECK(count == 500);
    }
}

TEST_CASE("the caller is worker 0 of an unpinned pool") {
    ThreadPool pool(3);
    std::vector<std::thread::id> ids(3);
    pool.run([&](int worker) { ids[static_cast<size_t>(worker)] = std::this_thread::get_id(); });
    CHECK(ids[0] == std::this_thread::get_id());
    CHECK(ids[1] != ids[0]);
    CHECK(ids[1] != ids[2]);
    const auto first = ids;
    pool.run([&](int worker) { ids[static_cast<size_t>(worker)] = std::this_thread::get_id(); });
    CHECK(ids == first);
}

TEST_CASE("pinned workers stay on their CPUs; the caller only waits") {
    const std::vector<int> cpus = glm53::allowed_cpus();
    REQUIRE(!cpus.empty());
    ThreadPool pool(cpus);
    CHECK(pool.size() == static_cast<int>(cpus.size()));
    std::vector<int> seen(cpus.size(), -1);
    std::atomic<bool> caller_worked{false};
    const auto caller = std::this_thread::get_id();
    pool.run([&](int worker) {
        std::this_thread::sleep_for(1ms);  // give the scheduler a reason to move a thread that is not pinned
        seen[static_cast<size_t>(worker)] = sched_getcpu();
        if (std::this_thread::get_id() == caller) caller_worked = true;
    });
    CHECK(seen == cpus);
    CHECK(!caller_worked);
}

TEST_CASE("parked workers wake, and use no CPU while parked") {
    ThreadPool pool(3, 100us);
    std::atomic<int> done{0};
    pool.run([&](int) { ++done; });
    std::this_thread::sleep_for(20ms);
    const std::clock_t before = std::clock();
    std::this_thread::sleep_for(200ms);
    CHECK(double(std::clock() - before) / CLOCKS_PER_SEC < 0.1);  // two spinning workers would take 0.2 s or more
    pool.run([&](int) { ++done; });
    CHECK(done == 6);
}

TEST_CASE("an exception comes back after all workers are done, and the pool stays usable") {
    ThreadPool pool(4);
    for (int round = 0; round < 50; ++round) {
        std::atomic<int> finished{0};
        CHECK_THROWS_WITH_AS(pool.run([&](int worker) {
            if (worker % 2) throw std::runtime_error("worker failed");
            ++finished;
        }),
                             "worker failed", std::runtime_error);
        CHECK(finished == 2);
    }
    std::atomic<int> ran{0};
    pool.run([&](int) { ++ran; });
    CHECK(ran == 4);
}

TEST_CASE("jobs from several threads queue") {
    ThreadPool pool(3);
    long total = 0;  // only one job runs at a time, so worker 0 of each may write it
    std::vector<std::thread> callers;
    for (int c = 0; c < 4; ++c) {
        callers.emplace_back([&] {
            for (int i = 0; i < 100; ++i) {
                pool.run([&](int worker) {
                    if (worker == 0) ++total;
                });
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(total == 400);
}

TEST_CASE("a job raised by a flag: a thread polls it and runs the pool") {
    ThreadPool pool(2);
    std::atomic<int> flag{0};
    std::atomic<int> answered{0};
    std::vector<int> results(2);
    std::thread lane([&] {
        for (int seen = 0; seen < 100;) {
            if (flag.load(std::memory_order_acquire) == seen) {
                std::this_thread::yield();
                continue;
            }
            ++seen;
            pool.run([&](int worker) { results[static_cast<size_t>(worker)] += seen; });
            answered.store(seen, std::memory_order_release);
        }
    });
    for (int i = 1; i <= 100; ++i) {
        flag.store(i, std::memory_order_release);
        while (answered.load(std::memory_order_acquire) != i) std::this_thread::yield();
        REQUIRE(results[0] == i * (i + 1) / 2);
        REQUIRE(results[1] == results[0]);
    }
    lane.join();
}

TEST_CASE("refusals") {
    CHECK_THROWS_AS(ThreadPool(0), std::invalid_argument);
    CHECK_THROWS_AS(ThreadPool(-3), std::invalid_argument);
    const std::vector<int> absent = {glm53::allowed_cpus().front(), 1000};
    CHECK_THROWS_WITH_AS(ThreadPool{absent}, doctest::Contains("CPU 1000"), std::invalid_argument);
    const std::vector<int> negative = {-1};
    CHECK_THROWS_AS(ThreadPool{negative}, std::invalid_argument);
    ThreadPool pool(2);
    CHECK_THROWS_AS(pool.run([&](int) { pool.run([](int) {}); }), std::logic_error);
    CHECK_THROWS_AS(glm53::pin_current_thread(100000), std::invalid_argument);
}

TEST_CASE("pools that never run a job stop cleanly") {
    for (int i = 0; i < 50; ++i) ThreadPool pool(4);
}

#if !defined(__SANITIZE_THREAD__)  // it does not follow a fork of a process with threads
TEST_CASE("a forked child is refused the pool and can drop it; the parent's goes on") {
    auto pool = std::make_unique<ThreadPool>(3);
    pool->run([](int) {});
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);  // a child that waits for threads it does not have is killed
        bool refused = false;
        try {
            pool->run([](int) {});
        } catch (const std::logic_error&) {
            refused = true;
        }
        pool.reset();
        _exit(refused ? 0 : 1);
    }
    REQUIRE(child > 0);
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    std::atomic<int> calls{0};
    pool->run([&](int) { ++calls; });
    CHECK(calls == 3);
}
#endif

TEST_CASE("topology") {
    const auto allowed = glm53::allowed_cpus();
    const auto physical = glm53::physical_cpus();
    CHECK(!physical.empty());
    CHECK(physical.size() <= allowed.size());
    CHECK(glm53::default_threads() >= 1);
    CHECK(glm53::default_threads() <= static_cast<int>(allowed.size()));
}
