#include "cache/expert_runtime.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "cache/lane_link.h"
#include "common/bytes.h"

namespace glm53 {
namespace {

constexpr int kRows = kExpertParts + 1;  // of a layer's image: its tables, and where its experts are away
constexpr std::size_t kPartAlign = 256;

std::vector<const void*> part_homes(const ExpertRuntimeConfig& config, const std::vector<LayerTables>& layers) {
    std::size_t stride = 0;
    std::vector<std::size_t> offsets;
    for (const std::size_t bytes : config.part_bytes) {
        offsets.push_back(stride);
        stride += align_up(bytes, kPartAlign);
    }
    std::vector<const void*> homes;
    homes.reserve(layers.size() * static_cast<std::size_t>(config.clock.experts) * offsets.size());
    for (const LayerTables& layer : layers) {
        for (int e = 0; e < config.clock.experts; ++e) {
            for (const std::size_t offset : offsets) {
                homes.push_back(
                    reinterpret_cast<const void*>(layer.home + static_cast<std::size_t>(e) * stride + offset));
            }
        }
    }
    return homes;
}

ExpertRuntimeConfig checked(ExpertRuntimeConfig config, const std::vector<LayerTables>& layers) {
    if (config.part_bytes.size() != kExpertParts) {
        throw std::invalid_argument("ExpertRuntime: an expert has gate, up and down, got " +
                                    std::to_string(config.part_bytes.size()) + " parts");
    }
    if (config.clock.layers != static_cast<int>(layers.size())) {
        throw std::invalid_argument("ExpertRuntime: tables of " + std::to_string(layers.size()) + " layers, " +
                                    std::to_string(config.clock.layers) + " configured");
    }
    if (config.clock.experts > kMaxExperts) {
        throw std::invalid_argument("ExpertRuntime: " + std::to_string(config.clock.experts) +
                                    " experts a layer, at most " + std::to_string(kMaxExperts));
    }
    return config;
}

}  // namespace

struct ExpertRuntime::DeviceMemory {
    DeviceMemory(Device& device, const ExpertRuntimeConfig& config, int segments) : device_(device) {
        const std::size_t layers = sizeof(LayerTables) * static_cast<std::size_t>(config.clock.layers);
        const std::size_t addresses = sizeof(std::uint64_t) * static_cast<std::size_t>(segments);
        const std::size_t at_segments = align_up(layers, kPartAlign);
        const std::size_t at_away = at_segments + align_up(addresses, kPartAlign);
        const std::size_t away = sizeof(std::uint64_t) * static_cast<std::size_t>(config.clock.layers) *
                                 static_cast<std::size_t>(config.clock.experts);
        const std::size_t at_copies = at_away + align_up(away, kPartAlign);
        const std::size_t at_prompts = at_copies + align_up(sizeof(CopyList), kPartAlign);
        base_ = static_cast<char*>(device.alloc(at_prompts + align_up(sizeof(PromptCounters), kPartAlign)));
        view.layers = reinterpret_cast<LayerTables*>(base_);
        view.segments = reinterpret_cast<std::uint64_t*>(base_ + at_segments);
        view.away = reinterpret_cast<std::uint64_t*>(base_ + at_away);
        view.copies = reinterpret_cast<CopyList*>(base_ + at_copies);
        view.prompts = reinterpret_cast<PromptCounters*>(base_ + at_prompts);
    }
    ~DeviceMemory() { device_.free(base_); }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    ExpertStepView view{};

  private:
    Device& device_;
    char* base_ = nullptr;
};

ExpertRuntime::ExpertRuntime(std::shared_ptr<Device> device, ExpertRuntimeConfig config,
                             std::vector<LayerTables> layers)
    : device_(std::move(device)), config_(checked(std::move(config), layers)), layers_(std::move(layers)) {
    const ClockConfig& c = config_.clock;
    ExpertCacheConfig cache;
    cache.clock = c;
    cache.part_bytes = config_.part_bytes;
    cache.segment_slots = config_.segment_slots;
    cache.max_loading = config_.max_loading;
    cache_ = std::make_unique<ExpertCache>(device_, cache, part_homes(config_, layers_));
    away_.resize(static_cast<std::size_t>(c.layers) * static_cast<std::size_t>(c.experts));
    for (int layer = 0; layer < c.layers; ++layer) {
        for (int e = 0; e < c.experts; ++e) away(layer, e) = home(layer, e);
    }
    const std::size_t region = sizeof(std::int64_t) * kRows * static_cast<std::size_t>(c.layers) * c.experts;
    mirrors_ = std::make_unique<HostArena>(kRegions * region, "address tables", device_);
    if (device_->is_cuda()) {
        memory_ = std::make_unique<DeviceMemory>(*device_, config_, cache_->segments());
        ExpertStepView& v = memory_->view;
        v.block = cache_->device_block();
        v.sizes = c;
        v.segment_slots = config_.segment_slots;
        v.slot_bytes = cache_->slot_bytes();
        for (int p = 0; p < kExpertParts; ++p) v.part_offset[p] = static_cast<std::uint32_t>(cache_->part_offset(p));
        const PromptCounters zero;
        device_->copy_async(const_cast<LayerTables*>(v.layers), layers_.data(), sizeof(LayerTables) * layers_.size(),
                            nullptr);
        device_->copy_async(v.prompts, &zero, sizeof zero, nullptr);
        device_->stream_synchronize(nullptr);
    }
    upload(nullptr);
    point_all(nullptr);
    device_->stream_synchronize(nullptr);
}

ExpertRuntime::~ExpertRuntime() {
    try {
        device_->stream_synchronize(compute_);
        if (copy_) device_->stream_synchronize(copy_);
    } catch (const DeviceFailure&) {  // a device that is gone reads nothing any more
    }
}

const ExpertStepView& ExpertRuntime::view() const {
    return memory_->view;
}

void ExpertRuntime::check_layer(int layer) const {
    if (layer < 0 || layer >= config_.clock.layers) {
        throw std::out_of_range("ExpertRuntime: no layer " + std::to_string(layer));
    }
}

void ExpertRuntime::download(StreamHandle compute) {
    if (!on_device()) return;
    cache_->download(compute);
    totals_.host_waits += 1;
}

// The policy state and the segments' addresses, which change together.
void ExpertRuntime::upload(StreamHandle compute) {
    if (!on_device()) return;
    std::vector<std::uint64_t> segments(static_cast<std::size_t>(cache_->segments()));
    for (int i = 0; i < cache_->segments(); ++i) {
        segments[i] = reinterpret_cast<std::uint64_t>(cache_->slot_address(i * config_.segment_slots));
    }
    device_->copy_async(const_cast<std::uint64_t*>(memory_->view.segments), segments.data(),
                        sizeof(std::uint64_t) * segments.size(), compute);
    cache_->upload(compute);  // waits for `compute`, so that `segments` may go
}

std::uint64_t ExpertRuntime::home(int layer, int expert) const {
    return layers_[layer].home + static_cast<std::uint64_t>(expert) * cache_->slot_bytes();
}

std::uint64_t ExpertRuntime::found(int layer, int expert) const {
    const int slot = cache_->slot_of(layer, expert);
    if (slot >= 0) return reinterpret_cast<std::uint64_t>(cache_->slot_address(slot));
    return away_[static_cast<std::size_t>(layer * config_.clock.experts + expert)];
}

std::int64_t* ExpertRuntime::mirror(int region, int layer, int part) const {
    const ClockConfig& c = config_.clock;
    const std::size_t row = static_cast<std::size_t>((region * c.layers + layer) * kRows + part);
    return reinterpret_cast<std::int64_t*>(mirrors_->data()) + row * static_cast<std::size_t>(c.experts);
}

void ExpertRuntime::write_tables(int region, int layer, StreamHandle compute) {
    if (on_device()) {
        const auto* pinned = static_cast<const std::int64_t*>(mirrors_->device_address());
        const auto* host = reinterpret_cast<const std::int64_t*>(mirrors_->data());
        launch_write_tables(memory_->view, layer, pinned + (mirror(region, layer, 0) - host), compute);
        return;
    }
    for (int p = 0; p < kExpertParts; ++p) {
        device_->copy_async(layers_[layer].part[p], mirror(region, layer, p),
                            sizeof(std::int64_t) * static_cast<std::size_t>(config_.clock.experts), compute);
    }
}

void ExpertRuntime::point(int layer, int expert, std::uint64_t base) {
    for (int p = 0; p < kExpertParts; ++p) {
        layers_[layer].part[p][expert] = static_cast<std::int64_t>(base + cache_->part_offset(p));
    }
}

// Fills the layer's image with what its entries should be now.
void ExpertRuntime::image(int region, int layer) {
    for (int e = 0; e < config_.clock.experts; ++e) {
        const std::uint64_t base = found(layer, e);
        for (int p = 0; p < kExpertParts; ++p) {
            mirror(region, layer, p)[e] = static_cast<std::int64_t>(base + cache_->part_offset(p));
        }
        mirror(region, layer, kExpertParts)[e] = static_cast<std::int64_t>(away(layer, e));
    }
}

void ExpertRuntime::point_all(StreamHandle compute) {
    for (int layer = 0; layer < config_.clock.layers; ++layer) {
        image(kRestored, layer);
        write_tables(kRestored, layer, compute);
    }
}

void ExpertRuntime::check_decode(int layer, int n, int rows) const {
    check_layer(layer);
    if (n < 0 || n > kClockMaxPicks || rows < 0) {
        throw std::invalid_argument("ExpertRuntime: a decode step has at most " + std::to_string(kClockMaxPicks) +
                                    " picks, got " + std::to_string(n));
    }
}

void ExpertRuntime::decode(int layer, const std::int64_t* picks, int n, int rows, StreamHandle compute) {
    check_decode(layer, n, rows);
    if (lane_) lane_->drop(compute);
    if (on_device()) {
        launch_decode_step(memory_->view, layer, picks, n, rows, config_.clock.max_admissions, compute);
    } else {
        host_step(layer, picks, n, rows, config_.clock.max_admissions, compute);
    }
}

// The step of a device without kernels.
const ClockStep& ExpertRuntime::host_step(int layer, const std::int64_t* picks, int n, int rows, int max_admissions,
                                          StreamHandle compute) {
    const ClockStep& step = cache_->step(layer, {picks, static_cast<std::size_t>(n)}, rows, max_admissions, compute);
    for (int u = 0; u < step.unique; ++u) {
        if (step.evicted[u] < 0) continue;
        const int owner = step.evicted[u] / config_.clock.experts, expert = step.evicted[u] % config_.clock.experts;
        point(owner, expert, away(owner, expert));
    }
    for (int u = 0; u < step.unique; ++u) point(layer, step.expert[u], found(layer, step.expert[u]));
    return step;
}

void ExpertRuntime::prompt(int layer, const std::int64_t* picks, int n, int rows, StreamHandle compute) {
    check_layer(layer);
    if (n < 0 || rows < 0) throw std::invalid_argument("ExpertRuntime: picks and rows must not be negative");
    if (lane_) lane_->drop(compute);
    if (on_device()) {
        launch_prompt_step(memory_->view, layer, picks, n, rows, !in_prompt(), compute);
        return;
    }
    std::vector<std::int32_t> counts(static_cast<std::size_t>(config_.clock.experts));
    for (int i = 0; i < n; ++i) {
        if (picks[i] >= 0 && picks[i] < config_.clock.experts) ++counts[picks[i]];
    }
    totals_.prompts.passes += 1;
    totals_.prompts.picks += static_cast<std::uint64_t>(n);
    for (int e = 0; e < config_.clock.experts; ++e) {
        totals_.prompts.distinct += counts[e] > 0;
        totals_.prompts.missing += counts[e] > 0 && cache_->slot_of(layer, e) < 0;
        if (!in_prompt()) point(layer, e, found(layer, e));
    }
    cache_->note_rows(layer, counts, rows);
}

std::size_t ExpertRuntime::lend(std::size_t bytes, StreamHandle compute) {
    if (in_prompt()) throw std::logic_error("ExpertRuntime: slots are lent before a long prompt begins");
    download(compute);
    std::size_t lent = 0;
    std::vector<std::int32_t> dropped;
    for (int s = cache_->segments() - 1; s >= 0 && lent < bytes; --s) {
        if (!cache_->slot_address(s * config_.segment_slots)) continue;  // lent already
        lent += static_cast<std::size_t>(cache_->segment_slots(s)) * cache_->slot_bytes();
        cache_->lend(s, true, dropped);
    }
    if (lent) {
        upload(compute);
        point_all(compute);
        device_->stream_synchronize(compute);  // the mirrors may be written again
    }
    return lent;
}

int ExpertRuntime::take_back(StreamHandle compute) {
    if (in_prompt()) throw std::logic_error("ExpertRuntime: slots are taken back after a long prompt ends");
    download(compute);
    int slots = 0;
    for (int s = 0; s < cache_->segments(); ++s) {
        if (cache_->slot_address(s * config_.segment_slots)) continue;
        if (!cache_->take_back(s)) break;
        slots += cache_->segment_slots(s);
    }
    if (slots) upload(compute);
    return slots;
}

int ExpertRuntime::refill(int count, StreamHandle compute, StreamHandle copy) {
    if (in_prompt()) throw std::logic_error("ExpertRuntime: refill runs between forward passes");
    compute_ = compute;
    copy_ = copy;
    download(compute);
    cache_->poll();
    const int started = cache_->refill(count, copy, compute);
    const int in_flight = cache_->poll();
    upload(compute);
    return std::max(started, in_flight);
}

std::vector<std::uint16_t> ExpertRuntime::export_heat(StreamHandle compute) {
    download(compute);
    return cache_->export_heat();
}

void ExpertRuntime::import_heat(std::span<const std::uint16_t> heat, StreamHandle compute) {
    download(compute);
    cache_->import_heat(heat);
    upload(compute);
}

void ExpertRuntime::set_knobs(const ClockConfig& knobs, StreamHandle compute) {
    download(compute);
    cache_->set_knobs(knobs);
    upload(compute);
}

std::vector<std::int32_t> ExpertRuntime::residency(StreamHandle compute) {
    download(compute);
    std::vector<std::int32_t> slots;
    for (int layer = 0; layer < config_.clock.layers; ++layer) {
        for (int e = 0; e < config_.clock.experts; ++e) slots.push_back(cache_->slot_of(layer, e));
    }
    return slots;
}

std::vector<SlotMismatch> ExpertRuntime::verify(StreamHandle compute) {
    download(compute);
    return cache_->verify(compute);
}

RuntimeStats ExpertRuntime::stats(StreamHandle compute) {
    download(compute);
    RuntimeStats stats = totals_;
    stats.cache = cache_->stats();
    if (on_device()) {
        device_->copy_async(&stats.prompts, memory_->view.prompts, sizeof stats.prompts, compute);
        device_->stream_synchronize(compute);
    }
    if (lane_) {
        const LaneCounts lane = lane_->counts(compute);
        stats.cpu_picks += lane.experts;
        stats.cpu_steps += lane.steps;
    }
    stats.cpu_bytes =
        stats.cpu_picks * std::accumulate(config_.part_bytes.begin(), config_.part_bytes.end(), std::uint64_t{0});
    stats.cache.home_bytes -= stats.cpu_bytes;
    return stats;
}

}  // namespace glm53
