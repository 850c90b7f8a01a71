// Bindings of the EXL3 reference decoder and the CPU expert tier.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "common/cpu_info.h"
#include "cpu/dispatch.h"
#include "cpu/moe.h"
#include "exl3/format.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace glm53::bindings {
namespace {

using Words3 = nb::ndarray<nb::ndim<3>, nb::c_contig, nb::device::cpu, nb::ro>;
using Halves = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu, nb::ro>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using PickRows = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <size_t N>
using NumpyWords = nb::ndarray<nb::numpy, uint16_t, nb::ndim<N>>;

template <class Array>
void require_16_bit(const Array& array, const char* name, bool floating) {
    const auto code = static_cast<nb::dlpack::dtype_code>(array.dtype().code);
    const bool is_floating = code == nb::dlpack::dtype_code::Float;
    const bool is_integer = code == nb::dlpack::dtype_code::Int || code == nb::dlpack::dtype_code::UInt;
    if (array.dtype().bits != 16 || !(floating ? is_floating || is_integer : is_integer)) {
        throw std::invalid_argument(std::string(name) + " must hold 16-bit " + (floating ? "floats" : "integers"));
    }
}

std::span<const uint16_t> trellis_words(const Words3& trellis) {
    require_16_bit(trellis, "trellis", false);
    return {static_cast<const uint16_t*>(trellis.data()), trellis.size()};
}

// A new NumPy array that owns its memory.
template <size_t N>
NumpyWords<N> new_words(const size_t (&shape)[N]) {
    size_t count = 1;
    for (const size_t extent : shape) count *= extent;
    auto memory = std::make_unique<uint16_t[]>(count);
    uint16_t* data = memory.get();
    nb::capsule owner(memory.release(), [](void* p) noexcept { delete[] static_cast<uint16_t*>(p); });
    return NumpyWords<N>(data, N, shape, owner);
}

NumpyWords<3> exl3_states(const Words3& trellis) {
    const auto words = trellis_words(trellis);
    const auto rate = exl3::Rate::from_words(static_cast<int64_t>(trellis.shape(2)));
    auto states = new_words<3>({trellis.shape(0), trellis.shape(1), size_t{exl3::kTileWeights}});
    const nb::gil_scoped_release release;
    exl3::decode_states(words, rate, {states.data(), states.size()});
    return states;
}

NumpyWords<2> exl3_inner_weight(const Words3& trellis, const std::string& codebook) {
    const auto words = trellis_words(trellis);
    const auto rate = exl3::Rate::from_words(static_cast<int64_t>(trellis.shape(2)));
    const auto book = exl3::codebook_from_name(codebook);
    const size_t k_tiles = trellis.shape(0);
    const size_t n_tiles = trellis.shape(1);
    auto weight = new_words<2>({k_tiles * exl3::kTileSide, n_tiles * exl3::kTileSide});
    const nb::gil_scoped_release release;
    exl3::decode_inner_weight(words, static_cast<int64_t>(k_tiles), static_cast<int64_t>(n_tiles), rate, book,
                              {weight.data(), weight.size()});
    return weight;
}

NumpyWords<1> exl3_signs(const Halves& words) {
    require_16_bit(words, "sign words", false);
    auto values = new_words<1>({words.size() * 16});
    exl3::expand_signs({static_cast<const uint16_t*>(words.data()), words.size()}, {values.data(), values.size()});
    return values;
}

nb::dict features() {
    const CpuFeatures& f = cpu_features();
    nb::dict result;
    result["avx2"] = f.avx2;
    result["fma"] = f.fma;
    result["f16c"] = f.f16c;
    result["avx512f"] = f.avx512f;
    result["avx512bw"] = f.avx512bw;
    result["avx512vl"] = f.avx512vl;
    result["avx512dq"] = f.avx512dq;
    result["avx512vbmi"] = f.avx512vbmi;
    result["avx512vnni"] = f.avx512vnni;
    result["amx_int8"] = f.amx_int8;
    result["isas"] = nb::cast(cpu::available_isas());
    result["isa"] = cpu::available_isas().front();
    return result;
}

cpu::Part part_from_name(const std::string& name) {
    if (name == "gate") return cpu::Part::kGate;
    if (name == "up") return cpu::Part::kUp;
    if (name == "down") return cpu::Part::kDown;
    throw std::invalid_argument("unknown part '" + name + "' of an expert: expected gate, up or down");
}

template <class Array>
std::span<const std::byte> bytes_of(const Array& array) {
    return {static_cast<const std::byte*>(static_cast<const void*>(array.data())), array.size() * 2};
}

std::span<const std::byte> bytes_at(uintptr_t address, size_t bytes) {
    return {reinterpret_cast<const std::byte*>(address), bytes};
}

void set_arrays(cpu::ExpertTable& table, int64_t expert, const std::string& part, const Words3& trellis,
                const Halves& suh, const Halves& svh, int bits) {
    require_16_bit(trellis, "trellis", false);
    require_16_bit(suh, "suh", true);
    require_16_bit(svh, "svh", true);
    table.set(expert, part_from_name(part), bytes_of(trellis), bytes_of(suh), bytes_of(svh), bits);
}

void set_addresses(cpu::ExpertTable& table, int64_t expert, const std::string& part, uintptr_t trellis,
                   size_t trellis_bytes, uintptr_t suh, size_t suh_bytes, uintptr_t svh, size_t svh_bytes, int bits) {
    table.set(expert, part_from_name(part), bytes_at(trellis, trellis_bytes), bytes_at(suh, suh_bytes),
              bytes_at(svh, svh_bytes), bits);
}

void require_shape(const char* name, size_t rows, size_t columns, size_t want_rows, size_t want_columns) {
    if (rows != want_rows || columns != want_columns) {
        throw std::invalid_argument(std::string(name) + " has shape (" + std::to_string(rows) + ", " +
                                    std::to_string(columns) + "), expected (" + std::to_string(want_rows) + ", " +
                                    std::to_string(want_columns) + ")");
    }
}

void forward(cpu::CpuMoe& moe, const cpu::ExpertTable& table, const FloatRows& x, const PickRows& picks,
             const FloatRows& weights, const OutRows& out) {
    const size_t hidden = static_cast<size_t>(table.hidden());
    require_shape("x", x.shape(0), x.shape(1), x.shape(0), hidden);
    require_shape("picks", picks.shape(0), picks.shape(1), x.shape(0), picks.shape(1));
    require_shape("weights", weights.shape(0), weights.shape(1), x.shape(0), picks.shape(1));
    require_shape("out", out.shape(0), out.shape(1), x.shape(0), hidden);
    const cpu::MoeCall call{x.data(),
                            picks.data(),
                            weights.data(),
                            out.data(),
                            static_cast<int64_t>(x.shape(0)),
                            static_cast<int64_t>(picks.shape(1))};
    const nb::gil_scoped_release release;
    moe.forward(table, call);
}

nb::dict stats(const cpu::CpuMoe& moe) {
    const cpu::MoeStats s = moe.stats();
    nb::dict result;
    result["calls"] = s.calls;
    result["rows"] = s.rows;
    result["picks"] = s.picks;
    result["expert_bytes"] = s.expert_bytes;
    result["seconds"] = s.seconds;
    return result;
}

void bind_exl3(nb::module_& m) {
    m.def("exl3_states", &exl3_states, "trellis"_a.noconvert(),
          "States of an EXL3 trellis: (k/16, n/16, 16 K) 16-bit words -> (k/16, n/16, 256) uint16, by ring position. "
          "K = 1..8, 1.5, 2.5, 3.5.");
    m.def("exl3_inner_weight", &exl3_inner_weight, "trellis"_a.noconvert(), "codebook"_a,
          "Decoded weight before its Hadamards and scales: (k/16, n/16, 16 K) 16-bit words -> (k, n) float16 bits as "
          "uint16 (view them as numpy.float16). codebook: '3inst', 'mcg' or 'mul1'.");
    m.def("exl3_signs", &exl3_signs, "words"_a.noconvert(),
          "Legacy su/sv sign words (n/16) -> n float16 +-1 bits as uint16; a set bit is -1, lowest bit first.");
}

void bind_table(nb::module_& m) {
    nb::class_<cpu::ExpertTable>(m, "ExpertTable",
                                 "Where the routed experts of one layer lie in memory (mul1 codebook, K = 2, 3, 4).")
        .def(nb::init<int64_t, int64_t, int64_t, float>(), "experts"_a, "hidden"_a, "intermediate"_a, "limit"_a,
             "hidden, intermediate: multiples of 128. limit: the SwiGLU clamp, 0 for none.")
        .def("set", &set_arrays, "expert"_a, "part"_a, "trellis"_a.noconvert(), "suh"_a.noconvert(),
             "svh"_a.noconvert(), "bits"_a, nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
             "part: 'gate', 'up' or 'down'. trellis (k/16, n/16, 16 bits) 16-bit words, suh (k) and svh (n) float16. "
             "The "
             "arrays are used in place and kept alive as long as the table.")
        .def("set_address", &set_addresses, "expert"_a, "part"_a, "trellis"_a, "trellis_bytes"_a, "suh"_a,
             "suh_bytes"_a, "svh"_a, "svh_bytes"_a, "bits"_a,
             "The same from raw addresses and their sizes in bytes; the caller keeps the memory alive and unchanged.")
        .def_prop_ro("experts", &cpu::ExpertTable::experts)
        .def_prop_ro("hidden", &cpu::ExpertTable::hidden)
        .def_prop_ro("intermediate", &cpu::ExpertTable::intermediate)
        .def_prop_ro("limit", &cpu::ExpertTable::limit);
}

void bind_moe(nb::module_& m) {
    nb::class_<cpu::CpuMoe>(m, "CpuMoe", "Runs routed experts on the CPU from their EXL3 bytes.")
        .def(
            "__init__",
            [](cpu::CpuMoe* self, int threads, const std::optional<std::vector<int>>& cpus, const std::string& isa) {
                const std::vector<int> list = cpus.value_or(std::vector<int>{});
                new (self) cpu::CpuMoe(threads, list, isa);
            },
            "threads"_a = 0, "cpus"_a = nb::none(), "isa"_a = "auto",
            "threads: 0 = one per physical core. cpus: pin one worker to each. isa: 'auto', 'amx', "
            "'avx512', 'avx512w', 'avx2', 'scalar'.")
        .def("forward", &forward, "table"_a, "x"_a.noconvert(), "picks"_a.noconvert(), "weights"_a.noconvert(),
             "out"_a.noconvert(),
             "out (rows, hidden) float32 := weighted sum of the picked experts of x (rows, hidden) float32; picks "
             "(rows, k) int64, weights (rows, k) float32; all C-contiguous on the CPU. Releases the GIL. IndexError "
             "for a "
             "pick outside the table, ValueError for a wrong shape or an expert that was never set.")
        .def("stats", &stats, "Counters: calls, rows, picks, expert_bytes (trellis bytes decoded), seconds.")
        .def_prop_ro("isa", &cpu::CpuMoe::isa)
        .def_prop_ro("threads", &cpu::CpuMoe::threads);
}

}  // namespace

void bind_cpu(nb::module_& m) {
    m.def("cpu_features", &features,
          "Instruction sets usable here (bool each), 'isas': kernel tables this CPU runs, best first, 'isa': the "
          "choice.");
    m.def("physical_cpus", &physical_cpus, "One logical CPU of each physical core in this process's affinity mask.");
    bind_exl3(m);
    bind_table(m);
    bind_moe(m);
}

}  // namespace glm53::bindings
