// A runtime over small real experts, for tests of the CPU lane: homes as slots want them, tables in the device's
// memory, and the experts computed by CpuMoe, either all from their homes or from wherever the tables lead.
#pragma once
#include <memory>
#include <random>
#include <vector>

#include "cache/expert_runtime.h"
#include "cpu/moe.h"
#include "small_experts.h"

namespace glm53::test {

inline constexpr std::size_t kPartBytes = kHidden * kInter * 3 / 8;  // a multiple of 256
inline constexpr std::size_t kExpertBytes = 3 * kPartBytes;

// One step of a layer: random picks (distinct within a row, skewed, often shared between rows), weights and inputs.
struct StepData {
    int layer, rows, top_k;
    std::vector<std::int64_t> picks;
    std::vector<std::uint16_t> weights, x;

    StepData(std::mt19937& random, int step_layer, int step_rows, int k, int experts, double skew)
        : layer(step_layer), rows(step_rows), top_k(k) {
        std::normal_distribution<float> normal;
        std::uniform_real_distribution<double> uniform;
        for (int r = 0; r < rows; ++r) {
            std::vector<std::int64_t> row;
            while (static_cast<int>(row.size()) < k) {
                const auto e = static_cast<std::int64_t>(experts * std::pow(uniform(random), skew));
                if (std::count(row.begin(), row.end(), e) == 0) row.push_back(e);
            }
            picks.insert(picks.end(), row.begin(), row.end());
        }
        for (int i = 0; i < rows * k; ++i) weights.push_back(float_to_half(0.125f + 0.25f * uniform(random)));
        for (int i = 0; i < rows * kHidden; ++i) x.push_back(float_to_half(normal(random)));
    }
    int n() const { return rows * top_k; }
};

// A buffer of the device with a host image; copies wait for the device.
template <class T>
class Both {
  public:
    Both(std::shared_ptr<Device> device, std::size_t count)
        : host(count), device_(std::move(device)), at_(device_->alloc(count * sizeof(T))) {}
    ~Both() { device_->free(at_); }
    Both(const Both&) = delete;
    Both& operator=(const Both&) = delete;

    T* at() const { return static_cast<T*>(at_); }
    void put(const std::vector<T>& values) {
        std::copy(values.begin(), values.end(), host.begin());
        copy(at_, host.data(), values.size());
    }
    std::vector<T> get(std::size_t count) {
        copy(host.data(), at_, count);
        return {host.begin(), host.begin() + static_cast<std::ptrdiff_t>(count)};
    }

    std::vector<T> host;

  private:
    void copy(void* to, const void* from, std::size_t count) {
        device_->copy_async(to, from, count * sizeof(T), nullptr);
        device_->stream_synchronize(nullptr);
    }
    std::shared_ptr<Device> device_;
    void* at_;
};

struct SmallRuntime {
    int layers, experts;
    std::shared_ptr<Device> device;
    std::vector<std::unique_ptr<Layer>> source;
    std::vector<std::unique_ptr<HostArena>> homes;
    std::vector<std::unique_ptr<ExpertTable>> home_tables;
    std::vector<std::int64_t*> tables;  // (layers * 3) in the device's memory
    std::unique_ptr<ExpertRuntime> runtime;
    cpu::CpuMoe moe{2, {}, "auto"};
    Both<std::int64_t> picks;
    Both<std::uint16_t> weights, x, half_out;
    Both<float> out;

    SmallRuntime(std::shared_ptr<Device> on, int layer_count, int expert_count, int slots, int max_admissions)
        : layers(layer_count),
          experts(expert_count),
          device(std::move(on)),
          picks(device, cpu::kLanePicks),
          weights(device, cpu::kLanePicks),
          x(device, cpu::kLaneRows * kHidden),
          half_out(device, cpu::kLaneRows * kHidden),
          out(device, cpu::kLaneRows * kHidden) {
        std::vector<LayerTables> described;
        for (int l = 0; l < layers; ++l) described.push_back(add_layer());
        ExpertRuntimeConfig config;
        config.clock.layers = layers;
        config.clock.experts = experts;
        config.clock.slots = slots;
        config.clock.max_admissions = max_admissions;
        config.clock.margin = 0;
        config.part_bytes.assign(3, kPartBytes);
        config.segment_slots = 2;
        runtime = std::make_unique<ExpertRuntime>(device, config, described);
    }
    ~SmallRuntime() {
        runtime.reset();
        for (std::int64_t* table : tables) device->free(table);
    }
    SmallRuntime(const SmallRuntime&) = delete;
    SmallRuntime& operator=(const SmallRuntime&) = delete;

    std::vector<const ExpertTable*> lane_tables() const {
        std::vector<const ExpertTable*> all;
        for (const auto& table : home_tables) all.push_back(table.get());
        return all;
    }
    void put(const StepData& step) {
        picks.put(step.picks);
        weights.put(step.weights);
        x.put(step.x);
    }
    void queue_split(const StepData& step, StreamHandle stream = nullptr) {
        runtime->decode_split(step.layer, picks.at(), step.n(), step.rows, x.at(), weights.at(), stream);
    }
    // Reads back what a split step may change.
    void get(StepData& step) {
        step.picks = picks.get(step.picks.size());
        step.weights = weights.get(step.weights.size());
        step.x = x.get(step.x.size());
    }
    void split(StepData& step) {
        put(step);
        queue_split(step);
        get(step);
    }
    void add(std::vector<float>& sum) {
        out.put(sum);
        runtime->add_partial(static_cast<int>(sum.size()) / kHidden, out.at(), false, nullptr);
        sum = out.get(sum.size());
    }
    void add(std::vector<std::uint16_t>& sum) {
        half_out.put(sum);
        runtime->add_partial(static_cast<int>(sum.size()) / kHidden, half_out.at(), true, nullptr);
        sum = half_out.get(sum.size());
    }
    // (rows, hidden) what all picks with a weight other than 0 come to, as the decode kernels count them.
    std::vector<float> sum(const ExpertTable& table, const StepData& step) {
        std::vector<std::int64_t> chosen = step.picks;
        std::vector<float> factors, rows, result(step.x.size());
        for (std::size_t i = 0; i < chosen.size(); ++i) {
            factors.push_back(half_to_float(step.weights[i]));
            if (factors[i] == 0.0f) chosen[i] = cpu::kSkippedPick;
        }
        for (const std::uint16_t value : step.x) rows.push_back(half_to_float(value));
        moe.forward(table, {rows.data(), chosen.data(), factors.data(), result.data(), step.rows, step.top_k, true});
        return result;
    }
    std::vector<float> sum_at_home(const StepData& step) {
        return sum(*home_tables[static_cast<std::size_t>(step.layer)], step);
    }
    // From where the layer's address tables lead now: homes, slots or staging buffers.
    std::vector<float> sum_by_tables(const StepData& step) {
        const auto count = static_cast<std::size_t>(experts);
        std::vector<std::byte> bytes(count * kExpertBytes);
        ExpertTable table(experts, kHidden, kInter, kLimit);
        for (int p = 0; p < 3; ++p) {
            std::vector<std::int64_t> addresses(count);
            const std::size_t row = static_cast<std::size_t>(step.layer) * 3 + static_cast<std::size_t>(p);
            copy(addresses.data(), tables[row], count * sizeof(std::int64_t));
            for (int e = 0; e < experts; ++e) {
                std::byte* to = bytes.data() + static_cast<std::size_t>(e) * kExpertBytes + p * kPartBytes;
                copy(to, reinterpret_cast<const void*>(addresses[static_cast<std::size_t>(e)]), kPartBytes);
                set(table, step.layer, e, p, to);
            }
        }
        return sum(table, step);
    }

  private:
    void copy(void* to, const void* from, std::size_t bytes) {
        device->copy_async(to, from, bytes, nullptr);
        device->stream_synchronize(nullptr);
    }
    const Linear& linear(int layer, int expert, int part) const {
        const Layer& l = *source[static_cast<std::size_t>(layer)];
        return (part == 0 ? l.gate : part == 1 ? l.up : l.down)[static_cast<std::size_t>(expert)];
    }
    void set(ExpertTable& table, int layer, int expert, int part, const std::byte* trellis) const {
        const Linear& from = linear(layer, expert, part);
        const auto bytes = [](const GuardedMemory& memory, int halves) {
            return std::span(reinterpret_cast<const std::byte*>(memory.data()), static_cast<std::size_t>(halves) * 2);
        };
        const Part parts[] = {Part::kGate, Part::kUp, Part::kDown};
        table.set(expert, parts[part], {trellis, kPartBytes}, bytes(*from.suh, from.k), bytes(*from.svh, from.n), 3);
    }
    LayerTables add_layer() {
        const int l = static_cast<int>(source.size());
        source.push_back(std::make_unique<Layer>(experts, 3, static_cast<unsigned>(l + 1)));
        homes.push_back(std::make_unique<HostArena>(static_cast<std::size_t>(experts) * kExpertBytes, "home", device));
        home_tables.push_back(std::make_unique<ExpertTable>(experts, kHidden, kInter, kLimit));
        for (int e = 0; e < experts; ++e) {
            for (int p = 0; p < 3; ++p) {
                const std::size_t at = static_cast<std::size_t>(e) * kExpertBytes + p * kPartBytes;
                homes.back()->write(at, linear(l, e, p).trellis->data(), kPartBytes);
                set(*home_tables.back(), l, e, p, homes.back()->data() + at);
            }
        }
        LayerTables described{};
        for (std::int64_t*& part : described.part) {
            part = static_cast<std::int64_t*>(device->alloc(static_cast<std::size_t>(experts) * sizeof(std::int64_t)));
            tables.push_back(part);
        }
        described.home = reinterpret_cast<std::uint64_t>(homes.back()->device_address());
        return described;
    }
};

}  // namespace glm53::test
