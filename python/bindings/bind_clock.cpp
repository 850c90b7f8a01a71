// Bindings of the expert cache's policy alone, for replaying routing traces.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache/clock.h"
#include "cache/clock_admin.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace glm53::bindings {
namespace {

using Picks = nb::ndarray<const std::int64_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
template <std::size_t N>
using Ints = nb::ndarray<nb::numpy, std::int32_t, nb::ndim<N>>;

template <std::size_t N>
Ints<N> new_ints(const std::size_t (&shape)[N]) {
    std::size_t count = 1;
    for (const std::size_t extent : shape) count *= extent;
    auto memory = std::make_unique<std::int32_t[]>(count);
    std::int32_t* data = memory.get();
    nb::capsule owner(memory.release(), [](void* p) noexcept { delete[] static_cast<std::int32_t*>(p); });
    return Ints<N>(data, N, shape, owner);
}

// The policy state on this host, with no slots' memory behind it.
class ClockPolicy {
  public:
    explicit ClockPolicy(const ClockConfig& config) {
        if (const char* error = clock_config_error(config)) {
            throw std::invalid_argument(std::string("ClockPolicy: ") + error);
        }
        block_.resize(clock_bytes(config) / sizeof(std::uint64_t) + 1);
        clock_init(block_.data(), config);
        view_ = clock_view(block_.data(), config);
    }

    Ints<3> replay(const Picks& picks, int rows) {
        const std::size_t steps = picks.shape(0), layers = picks.shape(1), n = picks.shape(2);
        if (layers != static_cast<std::size_t>(view_.header->config.layers) || n > kClockMaxPicks || rows < 1) {
            throw std::invalid_argument("replay: picks are (steps, " + std::to_string(view_.header->config.layers) +
                                        " layers, at most " + std::to_string(kClockMaxPicks) + " picks), got " +
                                        std::to_string(layers) + " layers, " + std::to_string(n) + " picks of " +
                                        std::to_string(rows) + " rows");
        }
        auto results = new_ints<3>({steps, layers, 3});
        std::int32_t* out = results.data();
        const std::int64_t* in = picks.data();
        const nb::gil_scoped_release release;
        for (std::size_t i = 0; i < steps * layers; ++i, in += n, out += 3) {
            clock_step(view_, static_cast<int>(i % layers), in, static_cast<int>(n), rows, kClockMaxPicks, step_,
                       scratch_, SerialLanes{});
            out[0] = step_.unique;
            out[1] = step_.hits;
            out[2] = step_.admitted;
        }
        return results;
    }

    Ints<1> owners() const {
        const auto slots = static_cast<std::size_t>(view_.header->config.slots);
        auto owners = new_ints<1>({slots});
        for (std::size_t s = 0; s < slots; ++s) owners.data()[s] = slot_owner(view_.slot_word[s]);
        return owners;
    }

  private:
    std::vector<std::uint64_t> block_;
    ClockView view_{};
    ClockStep step_{};
    ClockScratch scratch_{};
};

}  // namespace

void bind_clock(nb::module_& m) {
    nb::class_<ClockConfig>(m, "ClockConfig", "Sizes and knobs of the expert cache's policy; see cache/clock_state.h.")
        .def(
            "__init__",
            [](ClockConfig* self, int layers, int experts, int slots) {
                new (self) ClockConfig{.layers = layers, .experts = experts, .slots = slots};
            },
            "layers"_a, "experts"_a, "slots"_a)
        .def_ro("layers", &ClockConfig::layers)
        .def_ro("experts", &ClockConfig::experts)
        .def_ro("slots", &ClockConfig::slots)
        .def_rw("window", &ClockConfig::window)
        .def_rw("max_admissions", &ClockConfig::max_admissions)
        .def_rw("margin", &ClockConfig::margin)
        .def_rw("ref_max", &ClockConfig::ref_max)
        .def_rw("gain", &ClockConfig::gain)
        .def_rw("age_rows", &ClockConfig::age_rows)
        .def_rw("slow_shift", &ClockConfig::slow_shift)
        .def_rw("recent_shift", &ClockConfig::recent_shift)
        .def_rw("recent_weight", &ClockConfig::recent_weight);

    nb::class_<ClockPolicy>(m, "ClockPolicy", "The policy that decode steps run, on this host and without any bytes.")
        .def(nb::init<const ClockConfig&>(), "config"_a)
        .def("replay", &ClockPolicy::replay, "picks"_a, "rows"_a = 1,
             "picks (steps, layers, n) int64, of `rows` rows each -> (steps, layers, 3) int32: distinct picks, hits, "
             "admissions. The state carries on from call to call.")
        .def("owners", &ClockPolicy::owners, "(slots,) int32: layer * experts + expert in each slot, -1 for none.");
}

}  // namespace glm53::bindings
