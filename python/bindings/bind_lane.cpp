// Bindings of the CPU lane, its publisher on the host, and the CPU/GPU split.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "cache/split.h"
#include "cpu/lane.h"
#include "cpu/lane_publisher.h"
#include "memory/host_arena.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace glm53::bindings {
namespace {

using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using PickRows = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

std::span<std::byte> writable(HostArena& arena) {
    if (arena.state() == ArenaState::Sealed) throw std::invalid_argument("the CPU lane's arena is sealed");
    return {arena.data(), arena.bytes()};
}

void make_lane(cpu::CpuLane* self, std::vector<const cpu::ExpertTable*> tables, HostArena& arena, int threads,
               const std::optional<std::vector<int>>& cpus, const std::string& isa, int spin_us, int limit_ms) {
    if (spin_us < 0 || limit_ms < 1) throw std::invalid_argument("spin_us must be 0 or more, limit_ms 1 or more");
    cpu::LaneOptions options;
    options.threads = threads;
    options.cpus = cpus.value_or(std::vector<int>{});
    options.isa = isa;
    options.spin = std::chrono::microseconds(spin_us);
    options.limit = std::chrono::milliseconds(limit_ms);
    new (self) cpu::CpuLane(std::move(tables), writable(arena), std::move(options));
}

nb::dict health(const cpu::CpuLane& lane) {
    const cpu::LaneHealth h = lane.health();
    nb::dict result;
    result["verdict"] = cpu::lane_verdict_name(h.verdict);
    result["job"] = h.job;
    result["worker"] = h.worker;
    result["reason"] = h.reason;
    return result;
}

nb::dict lane_stats(const cpu::CpuLane& lane) {
    const cpu::LaneStats s = lane.stats();
    nb::dict result;
    result["jobs"] = s.jobs;
    result["bad_jobs"] = s.bad_jobs;
    result["picks"] = s.picks;
    result["expert_bytes"] = s.expert_bytes;
    result["parks"] = s.parks;
    result["parked"] = s.parked;
    result["seconds"] = s.seconds;
    return result;
}

uint32_t publish(cpu::LanePublisher& publisher, int layer, const FloatRows& x, const PickRows& picks,
                 const FloatRows& weights) {
    const size_t rows = x.shape(0), top_k = picks.shape(1);
    if (x.shape(1) != static_cast<size_t>(publisher.hidden()) || picks.shape(0) != rows || weights.shape(0) != rows ||
        weights.shape(1) != top_k) {
        throw std::invalid_argument("x must be (rows, " + std::to_string(publisher.hidden()) +
                                    "), picks and weights (rows, k)");
    }
    const auto clip = [](size_t n) { return static_cast<int>(std::min<size_t>(n, 1 << 20)); };
    return publisher.publish({layer, clip(rows), clip(top_k), picks.data(), weights.data(), x.data()});
}

const char* wait(cpu::LanePublisher& publisher, int limit_ms) {
    const nb::gil_scoped_release release;
    return cpu::lane_verdict_name(publisher.await(std::chrono::milliseconds(limit_ms)));
}

OutRows result(const cpu::LanePublisher& publisher, size_t rows) {
    if (rows > cpu::kLaneRows) throw std::invalid_argument("a job has up to 8 rows");
    const size_t hidden = static_cast<size_t>(publisher.hidden());
    auto memory = std::make_unique<float[]>(rows * hidden);
    std::copy_n(publisher.result(), rows * hidden, memory.get());
    float* data = memory.get();
    nb::capsule owner(memory.release(), [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return OutRows(data, {rows, hidden}, owner);
}

nb::dict split_misses(const std::vector<int>& rows, int admitted, const SplitConfig& config) {
    if (const char* error = split_config_error(config)) throw std::invalid_argument(error);
    if (admitted < 0 || rows.size() + static_cast<size_t>(admitted) > kClockMaxPicks) {
        throw std::invalid_argument("a step has up to 64 misses");
    }
    ClockStep step{};
    ClockScratch clock{};
    const int movable = static_cast<int>(rows.size());
    step.unique = movable + admitted;
    for (int u = 0; u < step.unique; ++u) {
        step.rows[u] = u < movable ? rows[static_cast<size_t>(u)] : 1;
        if (step.rows[u] < 1 || step.rows[u] > cpu::kLaneRows) throw std::invalid_argument("rows must be 1 to 8");
        clock.miss_key[u] = u < movable ? kNoKey - 1 - static_cast<uint32_t>(u) : kNoKey;
    }
    SplitStep out;
    SplitScratch scratch;
    split_step(config, step, clock, out, scratch, SerialLanes{});
    nb::dict result;
    result["cpu"] = out.cpu;
    result["cpu_ns"] = out.cpu_ns;
    result["gpu_ns"] = out.gpu_ns;
    return result;
}

void bind_split(nb::module_& m) {
    nb::class_<SplitConfig>(m, "SplitConfig",
                            "Constants of the CPU/GPU split: nanoseconds, the most experts a step gives to the CPU (0: "
                            "lane off), and the most misses it admits to slots.")
        .def(nb::init<>())
        .def_rw("handoff_ns", &SplitConfig::handoff_ns)
        .def_rw("cpu_expert_ns", &SplitConfig::cpu_expert_ns)
        .def_rw("cpu_row_ns", &SplitConfig::cpu_row_ns)
        .def_rw("pcie_expert_ns", &SplitConfig::pcie_expert_ns)
        .def_rw("cached_ns", &SplitConfig::cached_ns)
        .def_rw("max_cpu", &SplitConfig::max_cpu)
        .def_rw("max_admissions", &SplitConfig::max_admissions);
    m.def("split_misses", &split_misses, "rows"_a, "admitted"_a, "config"_a,
          "How many of a step's misses the CPU takes. rows: rows that picked each miss that may go to the CPU, coldest "
          "first; admitted: further misses that are copied to the GPU in any case. {'cpu', 'cpu_ns', 'gpu_ns'}.");
}

}  // namespace

void bind_lane(nb::module_& m) {
    nb::class_<cpu::CpuLane>(m, "CpuLane",
                             "Persistent workers that compute what a decode step leaves to the CPU; jobs come through "
                             "an arena that an ExpertRuntime or a LanePublisher writes.")
        .def("__init__", &make_lane, "tables"_a, "arena"_a, "threads"_a = 0, "cpus"_a = nb::none(), "isa"_a = "auto",
             "spin_us"_a = 2000, "limit_ms"_a = 1500, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
             "tables: one ExpertTable a MoE layer, of one hidden size. arena: lane_block_bytes(hidden) bytes, not "
             "sealed, cleared here. cpus: pin one worker to each. A job not done within limit_ms ends the lane.")
        .def("close", &cpu::CpuLane::close, nb::call_guard<nb::gil_scoped_release>(),
             "Ends the workers, without the GIL; waits for one inside a job, also for a stalled one. Once is enough.")
        .def("wake", &cpu::CpuLane::wake, "Makes parked workers spin: call it when a step is about to be queued.")
        .def("health", &health, "verdict ('ok' while it serves, 'stalled', 'died'), job, worker, reason.")
        .def("stats", &lane_stats, "Counters: jobs, bad_jobs, picks, expert_bytes, parks, parked, seconds.")
        .def_prop_ro("failed", &cpu::CpuLane::failed)
        .def_prop_ro("threads", &cpu::CpuLane::threads)
        .def_prop_ro("isa", &cpu::CpuLane::isa);
    nb::class_<cpu::LanePublisher>(m, "LanePublisher", "Publishes jobs from the host, to measure or test a CpuLane.")
        .def(
            "__init__",
            [](cpu::LanePublisher* self, HostArena& arena, int hidden) {
                if (hidden < cpu::kBlock || hidden % cpu::kBlock ||
                    writable(arena).size() < cpu::lane_block_bytes(hidden)) {
                    throw std::invalid_argument("the arena is not a CPU lane's of this hidden size");
                }
                new (self) cpu::LanePublisher(arena.data(), hidden);
            },
            "arena"_a, "hidden"_a, nb::keep_alive<1, 2>(), "Made after the lane and before its first job.")
        .def("publish", &publish, "layer"_a, "x"_a.noconvert(), "picks"_a.noconvert(), "weights"_a.noconvert(),
             "x (rows, hidden) float32, picks (rows, k) int32 with -1 for one that is not for the CPU, weights (rows, "
             "k) float32. Returns the job's number. RuntimeError when two jobs are outstanding or the lane has ended.")
        .def("wait", &wait, "limit_ms"_a = 5000,
             "Verdict of the oldest outstanding job: 'ok', 'bad job', 'stalled', 'died', or 'pending' after limit_ms.")
        .def("result", &result, "rows"_a, "A copy of the last waited job's sum, (rows, hidden) float32.");
    m.def(
        "lane_block_bytes", [](int hidden) { return cpu::lane_block_bytes(hidden); }, "hidden"_a,
        "Bytes of the memory that a CpuLane shares with its publisher.");
    bind_split(m);
}

}  // namespace glm53::bindings
