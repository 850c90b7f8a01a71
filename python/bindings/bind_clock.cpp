// Bindings of the expert cache's policy alone, for replaying routing traces.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cache/clock.h"
#include "cache/clock_admin.h"
#include "cache/clock_plan.h"
#include "cache/split.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace glm53::bindings {
namespace {

using Picks = nb::ndarray<const std::int64_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
template <std::size_t N, class Int = std::int32_t>
using Ints = nb::ndarray<nb::numpy, Int, nb::ndim<N>>;

template <class Int = std::int32_t, std::size_t N>
Ints<N, Int> new_ints(const std::size_t (&shape)[N]) {
    std::size_t count = 1;
    for (const std::size_t extent : shape) count *= extent;
    auto memory = std::make_unique<Int[]>(count);
    Int* data = memory.get();
    nb::capsule owner(memory.release(), [](void* p) noexcept { delete[] static_cast<Int*>(p); });
    return Ints<N, Int>(data, N, shape, owner);
}

// Makes up to `count` slots empty for the hottest experts that have none: the coldest go, each only if what would come
// is hotter by more than the margin. Returns how many of those experts find an empty slot now.
int make_room(const ClockView& view, int count) {
    const ClockConfig& c = view.header->config;
    const std::vector<std::int32_t> coming = clock_hottest_missing(view, count);
    const auto score_of = [&](std::int32_t entry) { return clock_score(c, view.heat[entry]); };
    std::vector<std::pair<std::uint32_t, int>> coldest;  // (score, slot)
    for (int slot = 0; slot < c.slots; ++slot) {
        const int owner = slot_owner(view.slot_word[slot]);
        if (owner >= 0 && !slot_pins(view.slot_word[slot])) coldest.emplace_back(score_of(owner), slot);
    }
    const int empty = view.header->free_slots;
    const int wanted = static_cast<int>(coming.size());
    const std::size_t kept = std::min(coldest.size(), static_cast<std::size_t>(std::max(wanted - empty, 0)));
    std::partial_sort(coldest.begin(), coldest.begin() + static_cast<std::ptrdiff_t>(kept), coldest.end());
    for (std::size_t i = 0; i < kept; ++i) {
        const std::int64_t heat = score_of(coming[static_cast<std::size_t>(empty) + i]);
        if (heat <= static_cast<std::int64_t>(coldest[i].first) + c.margin) break;
        clock_drop(view, coldest[i].second);
        view.free_list[view.header->free_slots++] = coldest[i].second;
        view.header->counters.evictions += 1;
    }
    return std::min(view.header->free_slots, wanted);
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
        check(picks, rows);
        const std::size_t steps = picks.shape(0), layers = picks.shape(1), n = picks.shape(2);
        auto results = new_ints<>({steps, layers, 3});
        std::int32_t* out = results.data();
        const std::int64_t* in = picks.data();
        const nb::gil_scoped_release release;
        for (std::size_t i = 0; i < steps * layers; ++i, in += n, out += 3) {
            step(i % layers, in, n, rows);
            out[0] = step_.unique;
            out[1] = step_.hits;
            out[2] = step_.admitted;
        }
        return results;
    }

    // As an engine with a CPU lane goes on: a split of every step, and between tokens loads in the background, which
    // are there one token later.
    Ints<3, std::int64_t> replay_lanes(const Picks& picks, int rows, const SplitConfig& split, int max_background) {
        check(picks, rows);
        if (const char* error = split_config_error(split)) throw std::invalid_argument(error);
        const std::size_t steps = picks.shape(0), layers = picks.shape(1), n = picks.shape(2);
        auto results = new_ints<std::int64_t>({steps, layers, 7});
        std::int64_t* out = results.data();
        const std::int64_t* in = picks.data();
        const nb::gil_scoped_release release;
        for (std::size_t i = 0; i < steps * layers; ++i, in += n, out += 7) {
            step(i % layers, in, n, rows);
            split_step(split, step_, scratch_, split_, split_scratch_, SerialLanes{});
            const std::int64_t row[] = {step_.unique,  step_.hits, step_.admitted, split_.cpu, split_.cpu_ns,
                                        split_.gpu_ns, 0};
            std::copy(std::begin(row), std::end(row), out);
            if (i % layers == layers - 1) out[6] = background(max_background);
        }
        return results;
    }

    Ints<1> owners() const {
        const auto slots = static_cast<std::size_t>(view_.header->config.slots);
        auto owners = new_ints<>({slots});
        for (std::size_t s = 0; s < slots; ++s) owners.data()[s] = slot_owner(view_.slot_word[s]);
        return owners;
    }

  private:
    void check(const Picks& picks, int rows) const {
        const std::size_t layers = picks.shape(1), n = picks.shape(2);
        if (layers != static_cast<std::size_t>(view_.header->config.layers) || n > kClockMaxPicks || rows < 1) {
            throw std::invalid_argument("replay: picks are (steps, " + std::to_string(view_.header->config.layers) +
                                        " layers, at most " + std::to_string(kClockMaxPicks) + " picks), got " +
                                        std::to_string(layers) + " layers, " + std::to_string(n) + " picks of " +
                                        std::to_string(rows) + " rows");
        }
    }
    void step(std::size_t layer, const std::int64_t* picks, std::size_t n, int rows) {
        clock_step(view_, static_cast<int>(layer), picks, static_cast<int>(n), rows, kClockMaxPicks, step_, scratch_,
                   SerialLanes{});
    }
    int background(int count) {
        for (const int slot : loading_) clock_publish(view_, slot);
        loading_.clear();
        for (const std::int32_t entry : clock_hottest_missing(view_, make_room(view_, count))) {
            loading_.push_back(clock_reserve(view_, entry));
        }
        return static_cast<int>(loading_.size());
    }

    std::vector<std::uint64_t> block_;
    ClockView view_{};
    ClockStep step_{};
    ClockScratch scratch_{};
    SplitStep split_{};
    SplitScratch split_scratch_{};
    std::vector<int> loading_;
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
        .def("replay_lanes", &ClockPolicy::replay_lanes, "picks"_a, "rows"_a, "split"_a, "max_background"_a = 0,
             "The same with a CPU lane -> (steps, layers, 7) int64: distinct picks, hits, admissions, experts for the "
             "CPU, its ns, the GPU's ns, and in a token's last layer the loads started behind it: max_background at "
             "most, each resident one token later.")
        .def("owners", &ClockPolicy::owners, "(slots,) int32: layer * experts + expert in each slot, -1 for none.");
}

}  // namespace glm53::bindings
