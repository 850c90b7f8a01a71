// Bindings of the device seam and the host arenas. Addresses cross as integers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "device/device.h"
#include "memory/host_arena.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace glm53::bindings {
namespace {

using Version = std::pair<std::uint64_t, std::int64_t>;
using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using BytesView = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>>;

const char* state_name(ArenaState state) {
    static constexpr const char* kNames[] = {"empty", "filling", "sealed"};
    return kNames[static_cast<int>(state)];
}

void read_file(HostArena& arena, const std::string& path, std::uint64_t file_offset, std::size_t arena_offset,
               std::size_t bytes, std::optional<Version> version) {
    std::optional<FileVersion> expected;
    if (version) expected = FileVersion{version->first, version->second};
    const nb::gil_scoped_release release;
    arena.read_file(path, file_offset, arena_offset, bytes, expected);
}

// pieces: (index of the file, file offset, arena offset, bytes).
void read_files(HostArena& arena, const std::vector<std::pair<std::string, Version>>& files,
                const std::vector<std::tuple<std::size_t, std::uint64_t, std::size_t, std::size_t>>& pieces) {
    const nb::gil_scoped_release release;
    std::vector<FileSource> sources;
    for (const auto& [path, version] : files) sources.push_back({path, FileVersion{version.first, version.second}});
    std::vector<FilePiece> ranges;
    for (const auto& [file, offset, at, bytes] : pieces) ranges.push_back({file, offset, at, bytes});
    arena.read_files(sources, ranges);
}

BytesView view(nb::handle_t<HostArena> self, std::size_t offset, std::size_t bytes) {
    const std::byte* data = nb::cast<const HostArena&>(self).view(offset, bytes);
    const std::size_t shape[1] = {bytes};
    return BytesView(reinterpret_cast<const std::uint8_t*>(data), 1, shape, self);
}

void bind_device(nb::module_& m) {
    nb::class_<Device>(m, "Device", "The seam to a GPU, or the host standing in for one.")
        .def_prop_ro("pinned_bytes", &Device::pinned_bytes, "Host bytes that are page-locked for it.");

    nb::class_<HostDevice, Device>(m, "HostDevice", "A working stand-in in host memory, for tests.")
        .def(nb::new_([](std::uint64_t total, std::size_t chunk) { return make_host_device(total, chunk); }),
             "total_bytes"_a = std::uint64_t{1} << 34, "pin_chunk_bytes"_a = kPinChunkBytes)
        .def("fail_pin_after", &HostDevice::fail_pin_after, "chunks"_a,
             "Makes the chunk after that many more fail to be page-locked, once.")
        .def("fail_next_alloc", &HostDevice::fail_next_alloc);

    m.def("cuda_device", &make_cuda_device, "index"_a, nb::call_guard<nb::gil_scoped_release>(),
          "The GPU of that index. Raises DeviceFailure without CUDA objects, without a driver, or for a bad index.");
}

void bind_arena(nb::module_& m) {
    nb::class_<ArenaStats>(m, "ArenaStats", "Bytes of one arena, by what became of them.")
        .def_ro("bytes", &ArenaStats::bytes)
        .def_ro("mapped_bytes", &ArenaStats::mapped_bytes)
        .def_ro("read_bytes", &ArenaStats::read_bytes)
        .def_ro("resident_bytes", &ArenaStats::resident_bytes)
        .def_ro("huge_bytes", &ArenaStats::huge_bytes, "Resident bytes that are on huge pages.")
        .def_ro("pinned_bytes", &ArenaStats::pinned_bytes);

    nb::class_<HostArena>(m, "HostArena",
                          "One exact-size block of host memory, page-locked when a device is given: filled once by any "
                          "number of threads, then sealed read-only.")
        .def(nb::init<std::size_t, std::string, std::shared_ptr<Device>>(), "bytes"_a, "name"_a,
             "device"_a.none() = nb::none(), nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("name", &HostArena::name)
        .def_prop_ro("bytes", &HostArena::bytes)
        .def_prop_ro("address", [](const HostArena& a) { return reinterpret_cast<std::uintptr_t>(a.data()); })
        .def_prop_ro(
            "device_address",
            [](const HostArena& a) -> std::optional<std::uintptr_t> {
                if (!a.device_address()) return std::nullopt;
                return reinterpret_cast<std::uintptr_t>(a.device_address());
            },
            "The device's address of the block; None without a device.")
        .def_prop_ro(
            "state", [](const HostArena& a) { return state_name(a.state()); }, "empty, filling or sealed")
        .def("reserve", &HostArena::reserve, "bytes"_a,
             "Offset of a 256-byte aligned range that nobody else gets. Raises ArenaError when the arena is full.")
        .def("read_file", &read_file, "path"_a, "file_offset"_a, "arena_offset"_a, "bytes"_a,
             "version"_a.none() = nb::none(),
             "Reads file bytes straight into the arena, without the GIL. version: (st_size, st_mtime_ns) the file must "
             "have. Raises ArenaError for a file that ends early, has another version, or changes during the read.")
        .def("read_files", &read_files, "files"_a, "pieces"_a,
             "read_file for many ranges in one call: files [(path, (st_size, st_mtime_ns))], pieces [(index of the "
             "file, file offset, arena offset, bytes)].")
        .def_prop_ro(
            "times",
            [](const HostArena& a) {
                const ArenaTimes t = a.times();
                nb::dict d;
                d["populate_s"] = t.populate_s;
                d["pin_s"] = t.pin_s;
                d["read_s"] = t.read_s;
                return d;
            },
            "Seconds threads spent on making its pages, page-locking them, and reading files.")
        .def(
            "write", [](HostArena& a, std::size_t at, const Bytes& data) { a.write(at, data.data(), data.nbytes()); },
            "arena_offset"_a, "data"_a)
        .def("seal", &HostArena::seal,
             "Makes the arena read-only for good. Raises ArenaError if a read failed or still runs.")
        .def("view", &view, "offset"_a, "bytes"_a, "(bytes,) uint8, read-only, no copy; keeps the arena alive.")
        .def("stats", &HostArena::stats, "Walks /proc/self/smaps: milliseconds.");
}

}  // namespace

void bind_memory(nb::module_& m) {
    nb::exception<DeviceFailure>(m, "DeviceFailure", PyExc_RuntimeError);
    nb::exception<ArenaError>(m, "ArenaError", PyExc_RuntimeError);
    bind_device(m);
    bind_arena(m);
}

}  // namespace glm53::bindings
