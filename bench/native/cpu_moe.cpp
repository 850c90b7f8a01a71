// Times whole routed experts (CpuMoe::forward) on experts that do not fit in the caches, in their on-disk order.
//
// Every forward gives all its rows the same top_k experts, so that each expert is decoded once per call; the next call
// takes the next experts, round the whole set. Variants (instruction set, rows, threads) and a plain read of the same
// memory are interleaved, so that another load on the machine meets all of them. One JSON object on stdout.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/cpu_info.h"
#include "cpu/dispatch.h"
#include "cpu/moe.h"
#include "experts.h"
#include "measure.h"
#include "options.h"

using namespace glm53;

namespace {

struct Settings {
    int experts = 44;
    int hidden = 4096;
    int intermediate = 2048;
    int bits = 3;
    int top_k = 8;
    int rounds = 9;
    int calls = 3;  // forwards a timed run
};

Settings parse(int argc, char** argv) {
    Settings s;
    bench::read_options(argc, argv,
                        {{"--experts", &s.experts},
                         {"--hidden", &s.hidden},
                         {"--intermediate", &s.intermediate},
                         {"--bits", &s.bits},
                         {"--top-k", &s.top_k},
                         {"--rounds", &s.rounds},
                         {"--calls", &s.calls}});
    if (s.experts < s.top_k || s.top_k < 1 || s.rounds < 1 || s.calls < 1) throw std::invalid_argument("bad settings");
    return s;
}

struct Run {
    double seconds_per_expert;
    double bytes_per_second;
    double bytes_per_cycle;
};

struct Variant {
    cpu::CpuMoe* moe;
    int rows;
    std::vector<Run> runs;
};

// Calls forward `calls` times, each with the next top_k experts.
Run time_forward(Variant& v, const bench::Experts& experts, const Settings& s, int& next_expert) {
    static std::vector<float> x, out, weights;
    static std::vector<int64_t> picks;
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    x.resize(static_cast<size_t>(v.rows) * s.hidden);
    out.resize(x.size());
    for (float& value : x) value = normal(random);
    weights.assign(static_cast<size_t>(v.rows) * s.top_k, 1.0f / static_cast<float>(s.top_k));
    picks.resize(weights.size());
    const uint64_t bytes_before = v.moe->stats().expert_bytes;
    const double clock_before = bench::clock_hz();
    double seconds = 0;
    for (int call = 0; call < s.calls; ++call) {
        for (size_t i = 0; i < picks.size(); ++i) picks[i] = (next_expert + static_cast<int>(i) % s.top_k) % s.experts;
        next_expert = (next_expert + s.top_k) % s.experts;
        const double begin = bench::now();
        v.moe->forward(experts.table, {x.data(), picks.data(), weights.data(), out.data(), v.rows, s.top_k});
        seconds += bench::now() - begin;
    }
    const double clock = (clock_before + bench::clock_hz()) / 2;
    const double rate = static_cast<double>(v.moe->stats().expert_bytes - bytes_before) / seconds;
    return {seconds / (s.calls * s.top_k), rate, rate / clock};
}

double time_read(const bench::Experts& experts, ThreadPool& pool) {
    std::atomic<uint64_t> sink{0};
    const double begin = bench::now();
    pool.run([&](int worker) {
        const size_t share = experts.bytes() / static_cast<size_t>(pool.size());
        sink.fetch_xor(bench::read_all(experts.data() + share * worker, share - 2048));
    });
    return static_cast<double>(experts.bytes()) / (bench::now() - begin);
}

void print_list(const char* name, const std::vector<Run>& runs, double Run::* member, const char* end) {
    std::printf("\"%s\": [", name);
    for (size_t i = 0; i < runs.size(); ++i) std::printf("%s%.6g", i ? ", " : "", runs[i].*member);
    std::printf("]%s", end);
}

void print_rates(const char* name, const std::vector<double>& values) {
    std::printf("\"%s\": [", name);
    for (size_t i = 0; i < values.size(); ++i) std::printf("%s%.6g", i ? ", " : "", values[i]);
    std::printf("], ");
}

int run(const Settings& s) {
    bench::Experts experts(s.experts, s.hidden, s.intermediate, s.bits);
    // The caller is worker 0 of every pool; worker 1 inherits the core its pool is made on. Left to itself, the
    // scheduler at times keeps two threads that wake each other on one core.
    const std::vector<int> cpus = physical_cpus();
    pin_current_thread(cpus.back());
    std::vector<std::unique_ptr<cpu::CpuMoe>> moes;
    std::vector<Variant> variants;
    for (const std::string& isa : cpu::available_isas()) {
        if (isa == "scalar") continue;
        for (const int threads : {1, 2}) {
            moes.push_back(std::make_unique<cpu::CpuMoe>(threads, std::span<const int>{}, isa));
            for (const int rows : {1, 2, 4, 8}) {
                if (threads == 1 || rows == 1) variants.push_back({moes.back().get(), rows, {}});
            }
        }
    }
    ThreadPool one(1), two(2);
    pin_current_thread(cpus.front());
    std::vector<double> read_one, read_two, clocks;
    int next_expert = 0;
    for (int round = 0; round < s.rounds; ++round) {
        read_one.push_back(time_read(experts, one));
        read_two.push_back(time_read(experts, two));
        clocks.push_back(bench::clock_hz());
        for (Variant& v : variants) v.runs.push_back(time_forward(v, experts, s, next_expert));
    }
    std::printf(
        "{\"settings\": {\"experts\": %d, \"hidden\": %d, \"intermediate\": %d, \"bits\": %d, \"top_k\": %d, "
        "\"rounds\": %d, \"calls\": %d, \"bytes\": %zu}, ",
        s.experts, s.hidden, s.intermediate, s.bits, s.top_k, s.rounds, s.calls, experts.bytes());
    print_rates("read_bytes_per_second_1", read_one);
    print_rates("read_bytes_per_second_2", read_two);
    print_rates("clock_hz", clocks);
    std::printf("\"variants\": [");
    for (size_t i = 0; i < variants.size(); ++i) {
        const Variant& v = variants[i];
        std::printf("%s{\"isa\": \"%s\", \"rows\": %d, \"threads\": %d, ", i ? ", " : "", v.moe->isa(), v.rows,
                    v.moe->threads());
        print_list("seconds_per_expert", v.runs, &Run::seconds_per_expert, ", ");
        print_list("bytes_per_second", v.runs, &Run::bytes_per_second, ", ");
        print_list("bytes_per_cycle", v.runs, &Run::bytes_per_cycle, "}");
    }
    std::printf("]}\n");
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run(parse(argc, argv));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_cpu_moe: %s\n", error.what());
        return 2;
    }
}
