// ThreadPool: persistent workers that run one job at a time, the same function on every worker.
//
// States of a worker: spinning (just after a job, for at most `spin`) -> parked (a futex wait, no CPU) -> working.
// Who changes what: run() writes the job, then publishes it by raising epoch_ (release); each worker reads epoch_
// (acquire), works, and lowers pending_ (release); run() returns when it reads pending_ == 0 (acquire). So the job's
// fields are only written while no worker reads them, and what the workers wrote is visible to the caller.
// Threads: run() may be called from any thread; calls from several threads queue on a mutex. run() inside a job of the
// same pool is refused. A forked child has none of the workers: run() is refused there, and the destructor leaves them.
// A thread that polls a flag (a job published by a device) calls run() as any other caller does.
// Costs: no allocation per job; one shared cache line to publish, one to finish; about 1 us while the workers spin,
// some tens of us when they must be woken.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <type_traits>
#include <vector>

namespace glm53 {

class ThreadPool {
  public:
    static constexpr std::chrono::microseconds kDefaultSpin{50};

    // `threads` workers, not pinned; the thread that calls run() is worker 0. Throws std::invalid_argument for < 1.
    explicit ThreadPool(int threads, std::chrono::microseconds spin = kDefaultSpin);
    // One worker pinned to each of `cpus`; the calling thread only waits. Throws std::invalid_argument if a CPU
    // cannot be used by this process.
    explicit ThreadPool(std::span<const int> cpus, std::chrono::microseconds spin = kDefaultSpin);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    // Calls job(worker) once for each worker in [0, size()) and waits for all. If workers threw, one of the exceptions
    // is thrown again here, after every worker has finished.
    template <class Job>
    void run(Job&& job) {
        using Plain = std::remove_reference_t<Job>;
        run_erased([](void* self, int worker) { (*static_cast<Plain*>(self))(worker); },
                   const_cast<void*>(static_cast<const void*>(std::addressof(job))));
    }

  private:
    using Call = void (*)(void* self, int worker);

    void start(std::span<const int> cpus);
    void stop();
    void run_erased(Call call, void* self);
    void work(int worker);
    void call_guarded(int worker) noexcept;
    template <class Ready>
    bool spin_until(Ready ready) const;

    const int size_;
    const bool caller_works_;
    const std::chrono::microseconds spin_;
    std::mutex run_mutex_;
    Call call_ = nullptr;
    void* self_ = nullptr;
    bool stop_ = false;
    pid_t owner_ = 0;  // the process that has the workers
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int32_t> pending_{0};
    std::vector<std::thread> threads_;
};

// Pins the calling thread to one CPU. Throws std::invalid_argument if this process may not use it.
void pin_current_thread(int cpu);

}  // namespace glm53
