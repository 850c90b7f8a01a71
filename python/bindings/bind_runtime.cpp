// Bindings of the device seam, the pinned arenas and the expert cache's runtime. Addresses and streams cross as
// integers.
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

nb::dict device_info(const Device& device) {
    const DeviceInfo i = device.info();
    nb::dict d;
    d["name"] = i.name;
    d["index"] = i.index;
    d["is_cuda"] = i.is_cuda;
    d["total_bytes"] = i.total_bytes;
    d["free_bytes"] = i.free_bytes;
    d["compute_capability"] = nb::make_tuple(i.cc_major, i.cc_minor);
    d["multiprocessors"] = i.multiprocessors;
    d["driver_version"] = i.driver_version;
    d["runtime_version"] = i.runtime_version;
    d["pci_bus_id"] = i.pci_bus_id;
    return d;
}

void read_file(HostArena& arena, const std::string& path, std::uint64_t file_offset, std::size_t arena_offset,
               std::size_t bytes, std::optional<std::pair<std::uint64_t, std::int64_t>> version) {
    std::optional<FileVersion> expected;
    if (version) expected = FileVersion{version->first, version->second};
    const nb::gil_scoped_release release;
    arena.read_file(path, file_offset, arena_offset, bytes, expected);
}

nb::dict arena_stats(const HostArena& arena) {
    const ArenaStats s = arena.stats();
    nb::dict d;
    d["bytes"] = s.bytes;
    d["mapped_bytes"] = s.mapped_bytes;
    d["read_bytes"] = s.read_bytes;
    d["resident_bytes"] = s.resident_bytes;
    d["huge_bytes"] = s.huge_bytes;
    d["pinned_bytes"] = s.pinned_bytes;
    return d;
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

void bind_device(nb::module_& m) {
    nb::exception<DeviceFailure>(m, "DeviceFailure", PyExc_RuntimeError);
    nb::class_<Device>(m, "Device", "The seam to a GPU, or the host standing in for one.")
        .def("info", &device_info)
        .def("pinned_bytes", &Device::pinned_bytes);
    m.def(
        "cuda_device", [](int index) { return make_cuda_device(index); }, "index"_a,
        "The GPU of that index. Raises DeviceFailure without CUDA objects, without a driver, or for a bad index.");
    m.def(
        "host_device", [](std::uint64_t bytes) { return std::shared_ptr<Device>(make_host_device(bytes)); },
        "bytes"_a = std::uint64_t{1} << 34, "A working stand-in in host memory, for tests.");
    nb::class_<HostArena>(m, "HostArena", "One exact-size block of host memory, page-locked when a device is given.")
        .def(nb::init<std::size_t, std::string, std::shared_ptr<Device>>(), "bytes"_a, "name"_a,
             "device"_a.none() = nb::none(), nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("address", [](const HostArena& a) { return reinterpret_cast<std::uintptr_t>(a.data()); })
        .def_prop_ro("device_address",
                     [](const HostArena& a) { return reinterpret_cast<std::uintptr_t>(a.device_address()); })
        .def_prop_ro("bytes", &HostArena::bytes)
        .def("read_file", &read_file, "path"_a, "file_offset"_a, "arena_offset"_a, "bytes"_a,
             "version"_a.none() = nb::none(),
             "Reads file bytes straight into the arena, without the GIL. version: (size, mtime_ns) the file must have.")
        .def("seal", &HostArena::seal, "Makes the arena read-only for good.")
        .def("stats", &arena_stats);
}

void bind_expert_runtime(nb::module_& m) {
    nb::class_<ExpertRuntime>(m, "ExpertRuntime",
                              "Slots, tables and staging of all MoE layers; one thread, one stream.")
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
            [](ExpertRuntime& r, std::size_t stage_bytes, std::uintptr_t stream, std::uintptr_t copy_stream) {
                r.begin_prompt(stage_bytes, stream_of(stream), stream_of(copy_stream));
            },
            "stage_bytes"_a, "stream"_a, "copy_stream"_a)
        .def(
            "enter_layer",
            [](ExpertRuntime& r, int layer, std::uintptr_t picks, int n, int rows) {
                r.enter_layer(layer, picks_at(picks), n, rows);
            },
            "layer"_a, "picks"_a, "n"_a, "rows"_a)
        .def("finish_prompt", &ExpertRuntime::finish_prompt)
        .def_prop_ro("in_prompt", &ExpertRuntime::in_prompt)
        .def("free_staging", &ExpertRuntime::free_staging)
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
    bind_device(m);
    bind_expert_runtime(m);
}

}  // namespace glm53::bindings
