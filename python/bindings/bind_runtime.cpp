// Bindings of the expert cache's runtime. Addresses and streams cross as integers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "cache/expert_runtime.h"
#include "device/device.h"
#include "memory/host_arena.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace glm53::bindings {
namespace {

using HeatArray = nb::ndarray<const std::uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

StreamHandle stream_of(std::uintptr_t stream) {
    return reinterpret_cast<StreamHandle>(stream);
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> to_numpy(std::vector<T> values) {
    auto* held = new std::vector<T>(std::move(values));
    nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    const std::size_t shape[1] = {held->size()};
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(held->data(), 1, shape, owner);
}

nb::dict runtime_stats(ExpertRuntime& runtime, std::uintptr_t stream) {
    const RuntimeStats s = runtime.stats(stream_of(stream));
    nb::dict d;
    d["steps"] = s.cache.counters.steps;
    d["picks"] = s.cache.counters.picks;
    d["hits"] = s.cache.counters.hits;
    d["misses"] = s.cache.counters.misses;
    d["admissions"] = s.cache.counters.admissions;
    d["evictions"] = s.cache.counters.evictions;
    d["refills"] = s.cache.counters.refills;
    d["slots"] = s.cache.slots;
    d["resident_slots"] = s.cache.resident;
    d["loading_slots"] = s.cache.loading;
    d["empty_slots"] = s.cache.empty;
    d["lent_slots"] = s.cache.lent;
    d["slot_bytes"] = s.cache.slot_bytes;
    d["admitted_bytes"] = s.cache.admitted_bytes;
    d["refilled_bytes"] = s.cache.refilled_bytes;
    d["home_bytes"] = s.cache.home_bytes;
    d["prompt_passes"] = s.prompts.passes;
    d["prompt_picks"] = s.prompts.picks;
    d["prompt_distinct"] = s.prompts.distinct;
    d["prompt_missing"] = s.prompts.missing;
    d["staged_bytes"] = s.staged_bytes;
    d["staged_experts"] = s.staged_experts;
    d["long_prompts"] = s.long_prompts;
    d["host_waits"] = s.host_waits;
    d["cpu_picks"] = s.cpu_picks;
    d["cpu_steps"] = s.cpu_steps;
    d["cpu_bytes"] = s.cpu_bytes;
    return d;
}

int* knob(ClockConfig& c, const std::string& name) {
    const std::pair<const char*, int*> known[] = {{"window", &c.window},
                                                  {"max_admissions", &c.max_admissions},
                                                  {"margin", &c.margin},
                                                  {"ref_max", &c.ref_max},
                                                  {"gain", &c.gain},
                                                  {"age_rows", &c.age_rows},
                                                  {"slow_shift", &c.slow_shift},
                                                  {"recent_shift", &c.recent_shift},
                                                  {"recent_weight", &c.recent_weight}};
    for (const auto& [key, field] : known) {
        if (name == key) return field;
    }
    throw std::invalid_argument("ExpertRuntime: no policy knob is called " + name);
}

ExpertRuntimeConfig runtime_config(std::size_t layers, int experts, int slots, int segment_slots,
                                   const std::vector<std::size_t>& part_bytes, const nb::dict& knobs) {
    ExpertRuntimeConfig config;
    config.clock.layers = static_cast<int>(layers);
    config.clock.experts = experts;
    config.clock.slots = slots;
    for (const auto& [key, value] : knobs) *knob(config.clock, nb::cast<std::string>(key)) = nb::cast<int>(value);
    config.part_bytes = part_bytes;
    config.segment_slots = segment_slots;
    return config;
}

std::vector<LayerTables> layer_tables(const std::vector<std::vector<std::uintptr_t>>& tables,
                                      const std::vector<std::uintptr_t>& homes) {
    if (tables.size() != homes.size()) throw std::invalid_argument("ExpertRuntime: one home per layer is needed");
    std::vector<LayerTables> layers;
    for (std::size_t l = 0; l < tables.size(); ++l) {
        if (tables[l].size() != kExpertParts) throw std::invalid_argument("ExpertRuntime: three tables per layer");
        LayerTables t{};
        for (int p = 0; p < kExpertParts; ++p) t.part[p] = reinterpret_cast<std::int64_t*>(tables[l][p]);
        t.home = homes[l];
        layers.push_back(t);
    }
    return layers;
}

std::vector<std::tuple<int, int, int>> mismatches(ExpertRuntime& runtime, std::uintptr_t stream) {
    std::vector<std::tuple<int, int, int>> found;
    for (const SlotMismatch& m : runtime.verify(stream_of(stream))) found.emplace_back(m.slot, m.entry, m.part);
    return found;
}

const std::int64_t* picks_at(std::uintptr_t address) {
    return reinterpret_cast<const std::int64_t*>(address);
}

void bind_runtime_lane(nb::class_<ExpertRuntime>& runtime) {
    runtime
        .def(
            "attach_lane",
            [](ExpertRuntime& r, HostArena& arena, int hidden, const SplitConfig& split, int limit_ms) {
                r.attach_lane(arena, hidden, split, std::chrono::milliseconds(limit_ms));
            },
            "arena"_a, "hidden"_a, "split"_a, "limit_ms"_a, nb::keep_alive<1, 2>(),
            "Takes the CPU lane that serves `arena` (page-locked for the device, not sealed) for decode_split, while "
            "the stream is idle. limit_ms: how long add_partial waits for a sum; more than the lane's own limit. "
            "RuntimeError when one is attached, ValueError for an arena, sizes or constants that do not fit.")
        .def(
            "detach_lane", [](ExpertRuntime& r, std::uintptr_t s) { r.detach_lane(stream_of(s)); }, "stream"_a,
            nb::call_guard<nb::gil_scoped_release>(), "Waits for the stream; does nothing when no lane is attached.")
        .def_prop_ro("has_lane", &ExpertRuntime::has_lane)
        .def(
            "set_split",
            [](ExpertRuntime& r, const SplitConfig& split, std::uintptr_t s) { r.set_split(split, stream_of(s)); },
            "split"_a, "stream"_a, "New constants from the next step on; waits for the stream.")
        .def(
            "decode_split",
            [](ExpertRuntime& r, int layer, std::uintptr_t picks, int n, int rows, std::uintptr_t x,
               std::uintptr_t weights, std::uintptr_t stream) {
                r.decode_split(layer, picks_at(picks), n, rows, reinterpret_cast<const void*>(x),
                               reinterpret_cast<void*>(weights), stream_of(stream));
            },
            "layer"_a, "picks"_a, "n"_a, "rows"_a, "x"_a, "weights"_a, "stream"_a,
            "decode, but the coldest misses go to the CPU lane. x: address of (rows, hidden) fp16; weights: address of "
            "(rows, n / rows) fp16, where 0 is written over those of the picks that went there.")
        .def(
            "add_partial",
            [](ExpertRuntime& r, int rows, std::uintptr_t out, bool half, std::uintptr_t stream) {
                r.add_partial(rows, reinterpret_cast<void*>(out), half, stream_of(stream));
            },
            "rows"_a, "out"_a, "half"_a, "stream"_a, nb::call_guard<nb::gil_scoped_release>(),
            "Adds the CPU's sum of the last decode_split, if it had any, to out: (rows, hidden) fp16 (half) or fp32.")
        .def(
            "lane_verdict", [](const ExpertRuntime& r) { return cpu::lane_verdict_name(r.lane_verdict()); },
            "'ok', or why a sum was not had: 'bad job', 'stalled', 'died'. The step in which it changed is not valid; "
            "from then on nothing goes to the CPU.");
}

nb::class_<ExpertRuntime> bind_expert_runtime(nb::module_& m) {
    nb::class_<ExpertRuntime> runtime(m, "ExpertRuntime",
                                      "Slots, tables and staging of all MoE layers; one thread, one stream.");
    runtime
        .def(
            "__init__",
            [](ExpertRuntime* self, std::shared_ptr<Device> device, int experts, int slots, int segment_slots,
               const std::vector<std::size_t>& part_bytes, const std::vector<std::vector<std::uintptr_t>>& tables,
               const std::vector<std::uintptr_t>& homes, const nb::dict& knobs) {
                new (self) ExpertRuntime(
                    std::move(device), runtime_config(tables.size(), experts, slots, segment_slots, part_bytes, knobs),
                    layer_tables(tables, homes));
            },
            "device"_a, "experts"_a, "slots"_a, "segment_slots"_a, "part_bytes"_a, "tables"_a, "homes"_a,
            "knobs"_a = nb::dict(),
            "tables: (layers, 3) addresses of (experts) int64 tables; homes: (layers) addresses of expert 0.")
        .def(
            "decode",
            [](ExpertRuntime& r, int layer, std::uintptr_t picks, int n, int rows, std::uintptr_t stream) {
                r.decode(layer, picks_at(picks), n, rows, stream_of(stream));
            },
            "layer"_a, "picks"_a, "n"_a, "rows"_a, "stream"_a)
        .def(
            "prompt",
            [](ExpertRuntime& r, int layer, std::uintptr_t picks, int n, int rows, std::uintptr_t stream) {
                r.prompt(layer, picks_at(picks), n, rows, stream_of(stream));
            },
            "layer"_a, "picks"_a, "n"_a, "rows"_a, "stream"_a)
        .def(
            "begin_prompt",
            [](ExpertRuntime& r, std::size_t stage_bytes, std::uintptr_t stream, std::uintptr_t copy_stream,
               int layers) { r.begin_prompt(stage_bytes, stream_of(stream), stream_of(copy_stream), layers); },
            "stage_bytes"_a, "stream"_a, "copy_stream"_a, "layers"_a = 0,
            "layers: MoE layers that the pass will enter, 0: all.")
        .def(
            "enter_layer",
            [](ExpertRuntime& r, int layer, std::uintptr_t picks, int n, int rows) {
                r.enter_layer(layer, picks_at(picks), n, rows);
            },
            "layer"_a, "picks"_a, "n"_a, "rows"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("finish_prompt", &ExpertRuntime::finish_prompt, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("in_prompt", &ExpertRuntime::in_prompt)
        .def("expert_address", &ExpertRuntime::expert_address, "layer"_a, "expert"_a,
             "Where a long prompt's layer that was entered finds an expert.")
        .def_prop_ro("has_staging", &ExpertRuntime::has_staging)
        .def("free_staging", &ExpertRuntime::free_staging);
    return runtime;
}

// What happens between forward passes.
void bind_runtime_between(nb::class_<ExpertRuntime>& runtime) {
    runtime
        .def(
            "lend", [](ExpertRuntime& r, std::size_t bytes, std::uintptr_t s) { return r.lend(bytes, stream_of(s)); },
            "bytes"_a, "stream"_a)
        .def(
            "take_back", [](ExpertRuntime& r, std::uintptr_t s) { return r.take_back(stream_of(s)); }, "stream"_a)
        .def(
            "refill",
            [](ExpertRuntime& r, int count, std::uintptr_t s, std::uintptr_t copy) {
                return r.refill(count, stream_of(s), stream_of(copy));
            },
            "count"_a, "stream"_a, "copy_stream"_a)
        .def(
            "export_heat", [](ExpertRuntime& r, std::uintptr_t s) { return to_numpy(r.export_heat(stream_of(s))); },
            "stream"_a)
        .def(
            "import_heat",
            [](ExpertRuntime& r, const HeatArray& heat, std::uintptr_t s) {
                r.import_heat({heat.data(), heat.size()}, stream_of(s));
            },
            "heat"_a, "stream"_a)
        .def(
            "residency", [](ExpertRuntime& r, std::uintptr_t s) { return to_numpy(r.residency(stream_of(s))); },
            "stream"_a, "(layers * experts) slot of each expert, -1 when it is only at home.")
        .def("verify", &mismatches, "stream"_a,
             "(slot, entry, part) of every resident expert that differs from its home; [] when all is well.")
        .def("stats", &runtime_stats, "stream"_a)
        .def_prop_ro("slot_bytes", &ExpertRuntime::slot_bytes);
}

}  // namespace

void bind_runtime(nb::module_& m) {
    nb::class_<ExpertRuntime> runtime = bind_expert_runtime(m);
    bind_runtime_lane(runtime);
    bind_runtime_between(runtime);
}

}  // namespace glm53::bindings
