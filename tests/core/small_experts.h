// Small random experts: their EXL3 bytes between guard pages, and the same weights decoded to float64.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "common/half.h"
#include "cpu/expert_table.h"
#include "exl3/format.h"
#include "guarded_memory.h"

namespace glm53::test {

inline constexpr int kHidden = 256;
inline constexpr int kInter = 384;
inline constexpr float kLimit = 2.0f;
using cpu::ExpertTable;
using cpu::Part;
using Matrix = std::vector<double>;  // (k, n)

struct Linear {
    int k, n, bits;
    std::unique_ptr<GuardedMemory> trellis, suh, svh;
    Matrix weight;

    Linear(int inputs, int outputs, int rate, float size, std::mt19937& random) : k(inputs), n(outputs), bits(rate) {
        const auto allocate = [](size_t bytes) {
            return std::make_unique<GuardedMemory>(bytes, GuardedMemory::Flush::kEnd);
        };
        trellis = allocate(trellis_bytes());
        for (size_t i = 0; i < trellis_bytes(); ++i) trellis->data()[i] = static_cast<uint8_t>(random());
        suh = allocate(static_cast<size_t>(k) * 2);
        svh = allocate(static_cast<size_t>(n) * 2);
        fill_scales(suh->data(), k, size, random);
        fill_scales(svh->data(), n, 1.0f, random);
        decode();
    }
    size_t trellis_bytes() const { return static_cast<size_t>(k * n * bits / 8); }

    void put(ExpertTable& table, int expert, Part part) const {
        const auto bytes = [](const GuardedMemory& memory, size_t count) {
            return std::span(reinterpret_cast<const std::byte*>(memory.data()), count);
        };
        table.set(expert, part, bytes(*trellis, trellis_bytes()), bytes(*suh, static_cast<size_t>(k) * 2),
                  bytes(*svh, static_cast<size_t>(n) * 2), bits);
    }

    std::vector<double> multiply(std::vector<double> x) const {
        const auto* in = reinterpret_cast<const uint16_t*>(suh->data());
        const auto* out = reinterpret_cast<const uint16_t*>(svh->data());
        for (int i = 0; i < k; ++i) x[static_cast<size_t>(i)] *= half_to_float(in[i]);
        hadamard(x);
        std::vector<double> y(static_cast<size_t>(n));
        for (int i = 0; i < k; ++i) {
            for (int j = 0; j < n; ++j) {
                y[static_cast<size_t>(j)] += x[static_cast<size_t>(i)] * weight[static_cast<size_t>(i * n + j)];
            }
        }
        hadamard(y);
        for (int j = 0; j < n; ++j) y[static_cast<size_t>(j)] *= half_to_float(out[j]);
        return y;
    }

  private:
    static void fill_scales(uint8_t* bytes, int count, float size, std::mt19937& random) {
        std::uniform_real_distribution<float> jitter(0.8f, 1.2f);
        for (int i = 0; i < count; ++i) {
            const uint16_t value = float_to_half((random() & 1 ? size : -size) * jitter(random));
            std::memcpy(bytes + 2 * i, &value, 2);
        }
    }
    static void hadamard(std::vector<double>& v) {
        for (size_t base = 0; base < v.size(); base += 128) {
            for (size_t width = 1; width < 128; width *= 2) {
                for (size_t i = base; i < base + 128; ++i) {
                    if ((i - base) & width) continue;
                    const double a = v[i];
                    v[i] = a + v[i + width];
                    v[i + width] = a - v[i + width];
                }
            }
        }
        for (double& value : v) value *= exl3::kHadamardScale;
    }
    void decode() {
        std::vector<uint16_t> words(trellis_bytes() / 2);
        std::memcpy(words.data(), trellis->data(), trellis_bytes());
        std::vector<uint16_t> halves(static_cast<size_t>(k * n));
        exl3::decode_inner_weight(words, k / 16, n / 16, exl3::Rate::from_words(16 * bits), exl3::Codebook::kMul1,
                                  halves);
        for (const uint16_t h : halves) weight.push_back(half_to_float(h));
    }
};

struct Layer {
    std::vector<Linear> gate, up, down;
    ExpertTable table;

    Layer(int experts, int bits, unsigned seed = 0) : table(experts, kHidden, kInter, kLimit) {
        std::mt19937 random(static_cast<unsigned>(bits) + 100 * seed);
        for (int e = 0; e < experts; ++e) {
            gate.emplace_back(kHidden, kInter, bits, 2.0f / 16, random);
            up.emplace_back(kHidden, kInter, bits, 2.0f / 16, random);
            down.emplace_back(kInter, kHidden, bits, 1.0f / 20, random);
            gate.back().put(table, e, Part::kGate);
            up.back().put(table, e, Part::kUp);
            down.back().put(table, e, Part::kDown);
        }
    }

    // How often each of the three clamps acts is counted in `clamped`: gate, up high, up low.
    std::vector<double> expert(int e, const float* x, int* clamped) const {
        const std::vector<double> input(x, x + kHidden);
        std::vector<double> g = gate[static_cast<size_t>(e)].multiply(input);
        const std::vector<double> u = up[static_cast<size_t>(e)].multiply(input);
        for (size_t i = 0; i < g.size(); ++i) {
            const double silu = g[i] / (1 + std::exp(-g[i]));
            clamped[0] += silu > kLimit;
            clamped[1] += u[i] > kLimit;
            clamped[2] += u[i] < -kLimit;
            g[i] = std::min(silu, double{kLimit}) * std::clamp(u[i], -double{kLimit}, double{kLimit});
        }
        return down[static_cast<size_t>(e)].multiply(g);
    }
};

}  // namespace glm53::test
