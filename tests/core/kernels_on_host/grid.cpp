#include "grid.h"

#include <sched.h>
#include <ucontext.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace glm53::test {
namespace {

constexpr int kWarp = 32;
constexpr std::size_t kStackBytes = 64 << 10;

enum class Wait { kNone, kBlock, kWarp, kDone };

struct Fiber {
    ucontext_t context{};
    std::unique_ptr<char[]> stack;
    Wait wait = Wait::kNone;
    unsigned value = 0;  // what it gives to a reduction
};

// One block's threads. Used by the queue's thread alone.
class Block {
  public:
    void run(int threads, const std::function<void()>& kernel);
    void meet(Wait wait) {
        Fiber& fiber = fibers_[static_cast<std::size_t>(current_)];
        fiber.wait = wait;
        swapcontext(&fiber.context, &main_);
    }
    unsigned warp_min(unsigned value) {
        const int me = current_;
        fibers_[static_cast<std::size_t>(me)].value = value;
        meet(Wait::kWarp);
        unsigned least = value;
        for (Fiber& other : warp(me / kWarp)) least = std::min(least, other.value);
        meet(Wait::kWarp);
        return least;
    }

  private:
    static void enter();
    std::span<Fiber> warp(int index) {
        const int first = index * kWarp;
        return std::span(fibers_).subspan(static_cast<std::size_t>(first),
                                          static_cast<std::size_t>(std::min(kWarp, threads_ - first)));
    }
    bool run_warp(int index);
    // Lets those that wait for each other go on once all others of the group wait with them or are done.
    static bool release(std::span<Fiber> group, Wait wait);

    std::vector<Fiber> fibers_;
    ucontext_t main_{};
    const std::function<void()>* kernel_ = nullptr;
    int threads_ = 0, current_ = 0;
    std::mt19937 random_{1};
};

Block block;

void Block::enter() {
    (*block.kernel_)();
    block.meet(Wait::kDone);
    std::abort();  // nobody resumes it
}

bool Block::release(std::span<Fiber> group, Wait wait) {
    bool any = false;
    for (const Fiber& fiber : group) {
        if (fiber.wait != wait && fiber.wait != Wait::kDone) return false;
        any |= fiber.wait == wait;
    }
    for (Fiber& fiber : group) {
        if (fiber.wait == wait) fiber.wait = Wait::kNone;
    }
    return any;
}

// Until all its lanes wait for the block or are done; false if nothing could run.
bool Block::run_warp(int index) {
    const std::span<Fiber> lanes = warp(index);
    bool moved = false;
    do {
        const std::size_t first = random_() % lanes.size();
        for (std::size_t i = 0; i < lanes.size(); ++i) {
            const std::size_t lane = (first + i) % lanes.size();
            if (lanes[lane].wait != Wait::kNone) continue;
            current_ = index * kWarp + static_cast<int>(lane);
            threadIdx.x = static_cast<unsigned>(current_);
            swapcontext(&main_, &lanes[lane].context);
            moved = true;
        }
    } while (release(lanes, Wait::kWarp));
    return moved;
}

void Block::run(int threads, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    threads_ = threads;
    if (fibers_.size() < static_cast<std::size_t>(threads)) fibers_.resize(static_cast<std::size_t>(threads));
    const std::span<Fiber> all = std::span(fibers_).first(static_cast<std::size_t>(threads));
    for (Fiber& fiber : all) {
        if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStackBytes);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = kStackBytes;
        makecontext(&fiber.context, &Block::enter, 0);
        fiber.wait = Wait::kNone;
    }
    const int warps = (threads + kWarp - 1) / kWarp;
    const auto done = [](const Fiber& fiber) { return fiber.wait == Wait::kDone; };
    while (!std::all_of(all.begin(), all.end(), done)) {
        bool moved = false;
        const int first = static_cast<int>(random_() % static_cast<unsigned>(warps));
        for (int w = 0; w < warps; ++w) moved |= run_warp((first + w) % warps);
        if (!release(all, Wait::kBlock) && !moved) {
            std::fputs("kernels_on_host: threads of a block wait at different barriers\n", stderr);
            std::abort();
        }
    }
}

class Queue {
  public:
    Queue() : thread_([this] { run(); }) {}
    ~Queue() {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }
    void push(std::function<void()> work) {
        {
            const std::lock_guard lock(mutex_);
            work_.push_back(std::move(work));
        }
        changed_.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return work_.empty() && !busy_; });
    }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return stop_ || !work_.empty(); });
            if (work_.empty()) return;
            const std::function<void()> next = std::move(work_.front());
            work_.pop_front();
            busy_ = true;
            lock.unlock();
            next();
            lock.lock();
            busy_ = false;
            changed_.notify_all();
        }
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    bool busy_ = false, stop_ = false;
    std::thread thread_;
};

Queue& queue() {
    static Queue one;
    return one;
}

}  // namespace

void launch(unsigned blocks, unsigned threads, std::function<void()> kernel) {
    enqueue([=] {
        gridDim = {blocks, 1, 1};
        blockDim = {threads, 1, 1};
        for (unsigned b = 0; b < blocks; ++b) {
            blockIdx = {b, 0, 0};
            block.run(static_cast<int>(threads), kernel);
        }
    });
}

void enqueue(std::function<void()> work) {
    queue().push(std::move(work));
}

void synchronize() {
    queue().wait();
}

void meet_block() {
    block.meet(Wait::kBlock);
}

void meet_warp() {
    block.meet(Wait::kWarp);
}

unsigned warp_min(unsigned value) {
    return block.warp_min(value);
}

std::uint64_t nanoseconds() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
}

void give_way() {
    sched_yield();
}

}  // namespace glm53::test
