#include "cpu/lane.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "common/cpu_info.h"
#include "common/relax.h"
#include "common/thread_pool.h"
#include "cpu/dispatch.h"

namespace glm53::cpu {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// More between two looks of the watchdog is time in which the whole process did not run, not a worker's fault.
constexpr auto kLongestTick = 100ms;

int checked_hidden(const std::vector<const ExpertTable*>& tables, std::span<std::byte> block) {
    if (tables.empty() || std::count(tables.begin(), tables.end(), nullptr)) {
        throw std::invalid_argument("a CPU lane needs an expert table for every MoE layer");
    }
    const int hidden = tables.front()->hidden();
    for (const ExpertTable* table : tables) {
        if (table->hidden() == hidden) continue;
        throw std::invalid_argument("expert tables of one CPU lane differ in hidden size: " + std::to_string(hidden) +
                                    " and " + std::to_string(table->hidden()));
    }
    if (block.size() < lane_block_bytes(hidden) || reinterpret_cast<std::uintptr_t>(block.data()) % kLaneLine) {
        throw std::invalid_argument("a CPU lane's block needs " + std::to_string(lane_block_bytes(hidden)) +
                                    " bytes at a multiple of 64, not " + std::to_string(block.size()));
    }
    return hidden;
}

size_t worker_count(const LaneOptions& options) {
    const std::vector<int> allowed = allowed_cpus();
    for (const int cpu : options.cpus) {
        if (!std::count(allowed.begin(), allowed.end(), cpu)) {
            throw std::invalid_argument("CPU " + std::to_string(cpu) + " cannot be used by this process");
        }
    }
    const int pinned = static_cast<int>(options.cpus.size());
    if (options.threads < 0 || options.threads > 4096 || (pinned && options.threads && options.threads != pinned)) {
        throw std::invalid_argument(std::to_string(options.threads) + " lane threads for " + std::to_string(pinned) +
                                    " CPUs: give one CPU per thread, or 0 threads");
    }
    return static_cast<size_t>(pinned ? pinned : options.threads ? options.threads : default_threads());
}

std::uint32_t number(std::uint64_t job) {
    return static_cast<std::uint32_t>(job);
}

LaneVerdict verdict_of(std::uint64_t word) {
    return static_cast<LaneVerdict>(word >> 32);
}

bool ends_lane(LaneVerdict verdict) {
    return verdict == LaneVerdict::kStalled || verdict == LaneVerdict::kDied;
}

void write_done(const LaneSlot& slot, std::uint64_t word) {
    std::atomic_ref(slot.done->word).store(word, std::memory_order_release);
}

}  // namespace

// The watchdog names the first worker that does not wait; who waits finds out here that the lane is over.
class CpuLane::Waiter final : public MoeWaiter {
  public:
    Waiter(const CpuLane& lane, Worker& mine, std::uint64_t job) : lane_(lane), mine_(mine), job_(job) {}
    void waits(bool now) override { mine_.arrived.store(now ? job_ : job_ - 1, std::memory_order_relaxed); }
    bool goes_on() override {
        if (lane_.options_.cpus.empty()) std::this_thread::yield();
        return !lane_.over();
    }

  private:
    const CpuLane& lane_;
    Worker& mine_;
    const std::uint64_t job_;
};

CpuLane::CpuLane(std::vector<const ExpertTable*> tables, std::span<std::byte> block, LaneOptions options)
    : kernels_(select_kernels(options.isa)),
      tables_(std::move(tables)),
      hidden_(checked_hidden(tables_, block)),
      block_(block.data()),
      options_(std::move(options)),
      workers_(worker_count(options_)),
      decided_(lane_done_word(LaneVerdict::kOk, 0)) {
    std::memset(block_, 0, lane_block_bytes(hidden_));
    for (auto& worker : workers_) worker = std::make_unique<Worker>();
    for (MoeTeam& team : teams_) {
        for (const ExpertTable* table : tables_) team.reserve(kernels_, *table, kLanePicks);
    }
    try {
        for (int w = 0; w < threads(); ++w)
            workers_[static_cast<size_t>(w)]->thread = std::thread([=, this] { work(w); });
        watchdog_ = std::thread([this] { watch(); });
    } catch (...) {
        stop();
        throw;
    }
}

CpuLane::~CpuLane() {
    stop();
    const std::uint64_t decided = decided_.load(std::memory_order_acquire);
    for (std::uint32_t job = number(decided) + 1; published(job); ++job) {
        write_done(lane_slot(block_, hidden_, job), lane_done_word(LaneVerdict::kDied, job));
    }
}

void CpuLane::stop() {
    stop_.store(true, std::memory_order_release);
    wake();
    for (auto& worker : workers_) {
        if (worker && worker->thread.joinable()) worker->thread.join();
    }
    if (watchdog_.joinable()) watchdog_.join();
}

void CpuLane::wake() {
    bell_.fetch_add(1, std::memory_order_release);
    bell_.notify_all();
}

bool CpuLane::failed() const {
    return ends_lane(verdict_of(decided_.load(std::memory_order_acquire)));
}

bool CpuLane::over() const {
    return stop_.load(std::memory_order_acquire) || failed();
}

bool CpuLane::published(std::uint64_t job) const {
    const LaneSlot slot = lane_slot(block_, hidden_, number(job));
    return std::atomic_ref(slot.job->published).load(std::memory_order_acquire) == number(job);
}

LaneHealth CpuLane::health() const {
    const std::lock_guard lock(health_mutex_);
    return health_;
}

LaneStats CpuLane::stats() const {
    LaneStats stats;
    stats.jobs = jobs_.load();
    stats.bad_jobs = bad_jobs_.load();
    stats.picks = picks_.load();
    stats.expert_bytes = bytes_.load();
    stats.parks = parks_.load();
    stats.parked = static_cast<int>(parked_.load());
    stats.seconds = static_cast<double>(nanoseconds_.load()) * 1e-9;
    return stats;
}

// Workers on CPUs of their own keep them; others give way to whoever they wait for.
template <class Ready>
bool CpuLane::spin(Ready ready, std::chrono::microseconds limit) const {
    const auto end = Clock::now() + limit;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            relax();
        }
        if (options_.cpus.empty()) std::this_thread::yield();
    } while (Clock::now() < end);
    return false;
}

void CpuLane::work(int worker) {
    std::uint64_t job = 1;
    try {
        if (!options_.cpus.empty()) pin_current_thread(options_.cpus[static_cast<size_t>(worker)]);
        while (await_job(job) && serve(worker, job)) ++job;
    } catch (const std::exception& error) {
        fail(LaneVerdict::kDied, decided_.load(std::memory_order_acquire), worker,
             "worker " + std::to_string(worker) + " failed in job " + std::to_string(job) + ": " + error.what());
    }
}

// False when the lane is over.
bool CpuLane::await_job(std::uint64_t job) {
    const auto ready = [&] { return published(job) || over(); };
    std::uint32_t bell = bell_.load(std::memory_order_acquire);
    while (!spin(ready, options_.spin)) {
        const std::uint32_t heard = std::exchange(bell, bell_.load(std::memory_order_acquire));
        if (heard != bell) continue;  // wake() was called meanwhile: a job comes soon
        parked_.fetch_add(1, std::memory_order_relaxed);
        parks_.fetch_add(1, std::memory_order_relaxed);
        if (!ready()) bell_.wait(bell, std::memory_order_acquire);
        parked_.fetch_sub(1, std::memory_order_relaxed);
    }
    return !over();
}

// Returns false when the lane is over before the job is done.
bool CpuLane::serve(int worker, std::uint64_t job) {
    const auto begin = Clock::now();
    const LaneSlot slot = lane_slot(block_, hidden_, number(job));
    if (options_.on_job) options_.on_job(worker, number(job));
    const LaneVerdict verdict = check(*slot.job);
    if (worker == 0) began_[job & 1] = begin;
    if (verdict == LaneVerdict::kOk && !compute(worker, slot, job)) return false;
    workers_[static_cast<size_t>(worker)]->arrived.store(job, std::memory_order_relaxed);
    // A fast worker may be a job ahead of a slow one, so jobs that may overlap are counted apart.
    const auto all = static_cast<std::int64_t>(workers_.size() * ((job + 1) / 2));
    if (finished_[job & 1].value.fetch_add(1, std::memory_order_acq_rel) + 1 == all) finish(worker, verdict, job);
    return true;
}

// By the last worker: what everybody did is seen here, and nobody is in the job any more.
void CpuLane::finish(int worker, LaneVerdict verdict, std::uint64_t job) {
    if (over()) return;
    const MoePlan& plan = workers_[static_cast<size_t>(worker)]->plan;
    const bool good = verdict == LaneVerdict::kOk;
    if (good && !plan.waves().empty()) teams_[job & 1].reset(plan.waves().front());
    // Before the verdict: who reads `done` then finds the job counted.
    (good ? jobs_ : bad_jobs_).fetch_add(1, std::memory_order_relaxed);
    const auto spent = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began_[job & 1]).count();
    nanoseconds_.fetch_add(static_cast<std::uint64_t>(spent), std::memory_order_relaxed);
    if (good) {
        picks_.fetch_add(plan.order().size(), std::memory_order_relaxed);
        bytes_.fetch_add(plan.bytes(), std::memory_order_relaxed);
    }
    decide(verdict, job);
}

LaneVerdict CpuLane::check(const LaneJob& job) const {
    constexpr auto bad = LaneVerdict::kBadJob;
    if (job.layer < 0 || job.layer >= std::ssize(tables_) || job.rows < 0 || job.rows > kLaneRows || job.top_k < 0) {
        return bad;
    }
    if (job.top_k > kLanePicks || job.rows * job.top_k > kLanePicks) return bad;
    const ExpertTable& table = *tables_[static_cast<size_t>(job.layer)];
    for (int i = 0; i < job.rows * job.top_k; ++i) {
        const std::int32_t pick = job.picks[i];
        if (pick == kSkippedPick) continue;
        if (pick < 0 || pick >= table.experts() || !table[pick].complete()) return bad;
    }
    return LaneVerdict::kOk;
}

// False when the lane is over before the job is done.
bool CpuLane::compute(int worker, const LaneSlot& slot, std::uint64_t job) {
    Worker& mine = *workers_[static_cast<size_t>(worker)];
    const LaneJob& in = *slot.job;
    const ExpertTable& table = *tables_[static_cast<size_t>(in.layer)];
    mine.plan.build(table, in.picks, std::int64_t{in.rows} * in.top_k);
    if (mine.plan.waves().empty()) {
        if (worker == 0) std::fill_n(slot.result, std::int64_t{in.rows} * hidden_, 0.0f);
        return true;
    }
    static_assert(kLanePicks <= kLeastWaveSlots);  // a job is one wave
    const int active = mine.plan.workers(threads());
    if (worker >= active) return true;
    Waiter waiter(*this, mine, job);
    return teams_[job & 1].work({kernels_, table, mine.plan, mine.plan.waves().front(), slot.x, in.weights, in.top_k,
                                 slot.result, in.rows, active},
                                waiter);
}

void CpuLane::decide(LaneVerdict verdict, std::uint64_t job) {
    std::uint64_t before = decided_.load(std::memory_order_acquire);
    if (number(before) != number(job - 1) || ends_lane(verdict_of(before))) return;
    const std::uint64_t word = lane_done_word(verdict, number(job));
    if (decided_.compare_exchange_strong(before, word)) write_done(lane_slot(block_, hidden_, number(job)), word);
}

// Ends the lane at the job after `decided`, unless that one has been decided in the meantime.
void CpuLane::fail(LaneVerdict verdict, std::uint64_t decided, int worker, const std::string& reason) {
    const std::lock_guard lock(health_mutex_);  // held over the exchange: whoever finds failed() finds the reason
    while (!ends_lane(verdict_of(decided))) {
        const std::uint32_t job = number(decided) + 1;
        const std::uint64_t word = lane_done_word(verdict, job);
        if (decided_.compare_exchange_strong(decided, word)) {
            health_ = {verdict, job, worker, reason};
            write_done(lane_slot(block_, hidden_, job), word);
            break;
        }
        if (verdict == LaneVerdict::kStalled) return;
    }
    wake();
}

void CpuLane::watch() {
    std::uint64_t decided = decided_.load(std::memory_order_acquire);
    auto before = Clock::now();
    std::chrono::nanoseconds waited{0};
    while (!stop_.load(std::memory_order_acquire)) {
        std::this_thread::sleep_for(options_.poll);
        const auto time = Clock::now();
        const std::uint64_t now = decided_.load(std::memory_order_acquire);
        const bool waiting = published(std::uint64_t{number(now)} + 1);
        waited = waiting && now == decided ? waited + std::min<Clock::duration>(time - before, kLongestTick) : 0ns;
        before = time;
        decided = now;
        if (waiting) watch_job(now, waited);
    }
}

// A job waits behind `decided`, for all the watchdog knows since `waited`.
void CpuLane::watch_job(std::uint64_t decided, std::chrono::nanoseconds waited) {
    const std::uint32_t job = number(decided) + 1;
    if (ends_lane(verdict_of(decided))) {  // nobody else decides any more
        const std::uint64_t word = lane_done_word(verdict_of(decided), job);
        decided_.store(word, std::memory_order_release);
        write_done(lane_slot(block_, hidden_, job), word);
        return;
    }
    if (parked_.load(std::memory_order_relaxed)) wake();
    if (waited < options_.limit) return;
    int late = 0;
    const auto arrived = [&](int worker) {  // some may be a job ahead
        const std::uint32_t last = number(workers_[static_cast<size_t>(worker)]->arrived.load());
        return static_cast<std::int32_t>(last - job) >= 0;
    };
    while (late < threads() && arrived(late)) ++late;
    const bool all_arrived = late == threads();
    fail(LaneVerdict::kStalled, decided, all_arrived ? -1 : late,
         "job " + std::to_string(job) + " was not done within " + std::to_string(options_.limit.count()) + " ms: " +
             (all_arrived ? "its sum was not finished"
                          : "worker " + std::to_string(late) + " of " + std::to_string(threads()) + " did not arrive"));
}

}  // namespace glm53::cpu
