#include "common/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/relax.h"

namespace glm53 {
namespace {

thread_local const ThreadPool* current_pool = nullptr;  // the pool whose job this thread is running

// Set for the length of a job on the thread that runs it, so that run() can refuse to be nested.
class InsideJob {
  public:
    explicit InsideJob(const ThreadPool* pool) : outer_(current_pool) { current_pool = pool; }
    ~InsideJob() { current_pool = outer_; }
    InsideJob(const InsideJob&) = delete;
    InsideJob& operator=(const InsideJob&) = delete;

  private:
    const ThreadPool* outer_;
};

void pin(pthread_t thread, int cpu) {
    if (cpu < 0 || cpu >= CPU_SETSIZE) throw std::invalid_argument("cannot pin a thread to CPU " + std::to_string(cpu));
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    const int error = pthread_setaffinity_np(thread, sizeof set, &set);
    if (error) {
        throw std::invalid_argument("cannot pin a thread to CPU " + std::to_string(cpu) + ": " + std::strerror(error));
    }
}

int at_least_one(std::ptrdiff_t threads) {
    if (threads < 1 || threads > 4096) {
        throw std::invalid_argument("a thread pool needs 1 to 4096 threads, not " + std::to_string(threads));
    }
    return static_cast<int>(threads);
}

}  // namespace

void pin_current_thread(int cpu) {
    pin(pthread_self(), cpu);
}

ThreadPool::ThreadPool(int threads, std::chrono::microseconds spin)
    : size_(at_least_one(threads)), caller_works_(true), spin_(spin) {
    start({});
}

ThreadPool::ThreadPool(std::span<const int> cpus, std::chrono::microseconds spin)
    : size_(at_least_one(std::ssize(cpus))), caller_works_(false), spin_(spin) {
    start(cpus);
}

ThreadPool::~ThreadPool() {
    stop();
}

void ThreadPool::start(std::span<const int> cpus) {
    owner_ = getpid();
    const int first = caller_works_ ? 1 : 0;
    threads_.reserve(static_cast<size_t>(size_ - first));
    try {
        for (int worker = first; worker < size_; ++worker) {
            threads_.emplace_back([this, worker] { work(worker); });
            if (!cpus.empty()) pin(threads_.back().native_handle(), cpus[static_cast<size_t>(worker)]);
        }
    } catch (...) {
        stop();
        throw;
    }
}

void ThreadPool::stop() {
    if (getpid() != owner_) {  // nothing to wait for: joining would never return
        for (std::thread& thread : threads_) thread.detach();
        return;
    }
    stop_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

// The clock is read once in 32 pauses: a pause is 40 to 140 cycles, so the limit is kept to a microsecond or so.
template <class Ready>
bool ThreadPool::spin_until(Ready ready) const {
    if (ready()) return true;
    const auto end = std::chrono::steady_clock::now() + spin_;
    while (std::chrono::steady_clock::now() < end) {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            relax();
        }
    }
    return false;
}

void ThreadPool::run_erased(Call call, void* self) {
    if (current_pool == this) throw std::logic_error("ThreadPool::run called from inside a job of the same pool");
    if (!threads_.empty() && getpid() != owner_) {
        throw std::logic_error("ThreadPool::run called in a forked process, which has none of the pool's threads");
    }
    const std::lock_guard lock(run_mutex_);
    call_ = call;
    self_ = self;
    pending_.store(static_cast<int32_t>(threads_.size()), std::memory_order_relaxed);
    if (!threads_.empty()) {
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
    }
    if (caller_works_) call_guarded(0);
    const auto done = [this] { return pending_.load(std::memory_order_acquire) == 0; };
    if (!spin_until(done)) {
        for (int32_t left; (left = pending_.load(std::memory_order_acquire)) != 0;) pending_.wait(left);
    }
    if (failed_.load(std::memory_order_acquire)) {
        failed_.store(false, std::memory_order_relaxed);
        std::rethrow_exception(std::exchange(error_, nullptr));
    }
}

void ThreadPool::call_guarded(int worker) noexcept {
    const InsideJob inside(this);
    try {
        call_(self_, worker);
    } catch (...) {
        // The first to fail owns error_ until run() takes it, which it does only after every worker has finished.
        if (!failed_.exchange(true, std::memory_order_acq_rel)) error_ = std::current_exception();
    }
}

void ThreadPool::work(int worker) {
    uint32_t seen = 0;
    for (;;) {
        const auto published = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
        if (!spin_until(published)) {
            while (!published()) epoch_.wait(seen, std::memory_order_acquire);
        }
        ++seen;  // a worker never misses a job: run() waits for all of them
        if (stop_) return;
        call_guarded(worker);
        if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
    }
}

}  // namespace glm53
