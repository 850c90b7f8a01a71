// Times the CPU lane as a publisher sees it: from writing a job to reading its result, for jobs of 0 to --experts-a-job
// experts, on 1 to --threads workers. One JSON object on stdout.
//
// Every job takes the next experts of a set that does not fit in the caches. "hot" jobs come `--gap-us` after the last
// one, so that the workers are still spinning; "parked" ones find them asleep and are announced with wake(). CpuMoe
// with the same threads runs the same experts in between, so that another load on the machine meets both; so do the
// kernels alone, on as many threads with experts of their own.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/lane.h"
#include "cpu/lane_publisher.h"
#include "cpu/moe.h"
#include "experts.h"
#include "kernel_alone.h"
#include "measure.h"
#include "memory/host_arena.h"
#include "options.h"

using namespace glm53;
using namespace std::chrono_literals;

namespace {

struct Settings {
    int experts = 44;
    int hidden = 4096;
    int intermediate = 2048;
    int bits = 3;
    int rows = 1;
    int experts_a_job = 8;
    int threads = 2;
    int rounds = 9;
    int empty_jobs = 400;
    int gap_us = 100;
};

Settings parse(int argc, char** argv) {
    Settings s;
    bench::read_options(argc, argv,
                        {{"--experts", &s.experts},
                         {"--hidden", &s.hidden},
                         {"--intermediate", &s.intermediate},
                         {"--bits", &s.bits},
                         {"--rows", &s.rows},
                         {"--experts-a-job", &s.experts_a_job},
                         {"--threads", &s.threads},
                         {"--rounds", &s.rounds},
                         {"--empty-jobs", &s.empty_jobs},
                         {"--gap-us", &s.gap_us}});
    if (s.rows < 1 || s.rows > cpu::kLaneRows || s.experts_a_job < 1 || s.rows * s.experts_a_job > cpu::kLanePicks ||
        s.experts < s.experts_a_job || s.threads < 1 || s.rounds < 1 || s.empty_jobs < 1 || s.gap_us < 0) {
        throw std::invalid_argument("bad settings");
    }
    return s;
}

// One number of workers: a lane, its publisher and a CpuMoe of the same size.
class Bench {
  public:
    Bench(const Settings& s, const bench::Experts& experts, int threads)
        : s_(s),
          experts_(experts),
          arena_(cpu::lane_block_bytes(s.hidden), "CPU lane"),
          lane_({&experts.table}, {arena_.data(), arena_.bytes()}, options(threads)),
          moe_(threads, {}, "auto"),
          publisher_(arena_.data(), s.hidden),
          x_(static_cast<size_t>(s.rows * s.hidden), 0.25f),
          out_(x_.size()) {}

    // Seconds from the first write of a job with the next `count` experts to its result.
    double job(int count) {
        take(count);
        const double begin = bench::now();
        publisher_.publish({0, s_.rows, count, picks_.data(), weights_.data(), x_.data()});
        const cpu::LaneVerdict verdict = publisher_.await(5000ms);
        const double end = bench::now();
        if (verdict != cpu::LaneVerdict::kOk) throw std::runtime_error("the lane failed: " + lane_.health().reason);
        return end - begin;
    }
    double forward(int count) {
        take(count);
        const std::vector<std::int64_t> wide(picks_.begin(), picks_.end());
        const double begin = bench::now();
        moe_.forward(experts_.table, {x_.data(), wide.data(), weights_.data(), out_.data(), s_.rows, count});
        return bench::now() - begin;
    }
    // Seconds of an expert, for about as long as a large job takes.
    double kernel() const {
        return bench::kernel_alone(cpu::select_kernels(lane_.isa()), experts_, lane_.threads(), kKernelSeconds);
    }
    void rest() const {
        while (lane_.stats().parked < lane_.threads()) std::this_thread::sleep_for(500us);
    }
    double parked_job() {
        rest();
        lane_.wake();
        return job(0);
    }
    void gap() const { std::this_thread::sleep_for(std::chrono::microseconds(s_.gap_us)); }
    const char* isa() const { return lane_.isa(); }

  private:
    static constexpr double kKernelSeconds = 0.02;

    static cpu::LaneOptions options(int threads) {
        cpu::LaneOptions options;
        options.threads = threads;
        return options;
    }
    // All rows pick the same experts, so that each is decoded once.
    void take(int count) {
        const size_t picks = static_cast<size_t>(s_.rows * count);
        picks_.resize(picks);
        weights_.assign(picks, 0.125f);
        for (size_t i = 0; i < picks; ++i) picks_[i] = (next_ + static_cast<int>(i) % count) % s_.experts;
        next_ = (next_ + count) % s_.experts;
    }

    const Settings& s_;
    const bench::Experts& experts_;
    HostArena arena_;
    cpu::CpuLane lane_;
    cpu::CpuMoe moe_;
    cpu::LanePublisher publisher_;
    std::vector<float> x_, out_, weights_;
    std::vector<std::int32_t> picks_;
    int next_ = 0;
};

void print_list(const std::string& name, const std::vector<double>& values, const char* end) {
    std::printf("\"%s\": [", name.c_str());
    for (size_t i = 0; i < values.size(); ++i) std::printf("%s%.6g", i ? ", " : "", values[i]);
    std::printf("]%s", end);
}

void measure(const Settings& s, const bench::Experts& experts, int threads) {
    Bench b(s, experts, threads);
    std::vector<double> empty, parked, kernel;
    std::vector<std::vector<double>> jobs(static_cast<size_t>(s.experts_a_job)), forwards(jobs.size());
    for (int i = 0; i < s.empty_jobs; ++i) {
        empty.push_back(b.job(0));
        b.gap();
    }
    for (int i = 0; i < std::min(s.empty_jobs, 50); ++i) parked.push_back(b.parked_job());
    for (int round = 0; round < s.rounds; ++round) {
        for (int count = 1; count <= s.experts_a_job; ++count) {
            jobs[static_cast<size_t>(count - 1)].push_back(b.job(count));
            b.gap();
            forwards[static_cast<size_t>(count - 1)].push_back(b.forward(count));
        }
        b.rest();
        kernel.push_back(b.kernel());
    }
    std::printf("{\"threads\": %d, \"isa\": \"%s\", ", threads, b.isa());
    print_list("empty_seconds", empty, ", ");
    print_list("parked_seconds", parked, ", ");
    print_list("kernel_seconds", kernel, ", \"jobs\": [");
    for (size_t i = 0; i < jobs.size(); ++i) {
        std::printf("%s{\"experts\": %zu, ", i ? ", " : "", i + 1);
        print_list("seconds", jobs[i], ", ");
        print_list("moe_seconds", forwards[i], "}");
    }
    std::printf("]}");
}

int run(const Settings& s) {
    const bench::Experts experts(s.experts, s.hidden, s.intermediate, s.bits);
    std::printf(
        "{\"settings\": {\"experts\": %d, \"hidden\": %d, \"intermediate\": %d, \"bits\": %d, \"rows\": %d, "
        "\"experts_a_job\": %d, \"rounds\": %d, \"empty_jobs\": %d, \"gap_us\": %d, \"expert_bytes\": %zu}, "
        "\"workers\": [",
        s.experts, s.hidden, s.intermediate, s.bits, s.rows, s.experts_a_job, s.rounds, s.empty_jobs, s.gap_us,
        experts.bytes() / static_cast<size_t>(s.experts));
    for (int threads = 1; threads <= s.threads; ++threads) {
        if (threads > 1) std::printf(", ");
        measure(s, experts, threads);
    }
    std::printf("]}\n");
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run(parse(argc, argv));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_cpu_lane: %s\n", error.what());
        return 2;
    }
}
