// The expert kernels without anything around them: what whole jobs are measured against.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu/kernels.h"
#include "experts.h"
#include "measure.h"

namespace glm53::bench {

// Rounded activations of one row, every value alike: what they are costs no kernel more or less.
class KernelInput {
  public:
    KernelInput(const cpu::Kernels& kernels, int channels)
        : values_(static_cast<size_t>(channels * kernels.words_per_value), 1000),
          bias_(static_cast<size_t>(channels / cpu::kBlock)),
          scale_(bias_.size(), 1e-3f),
          channels_(channels) {}
    cpu::Activations view() { return {values_.data(), bias_.data(), scale_.data(), channels_, true}; }

  private:
    std::vector<int16_t> values_;
    std::vector<int32_t> bias_;
    std::vector<float> scale_;
    int channels_;
};

// Gate, up and down of whole experts on `threads` threads, each with experts of its own, for about `seconds`. Returns
// the seconds an expert takes, over all threads together.
inline double kernel_alone(const cpu::Kernels& kernels, const Experts& experts, int threads, double seconds) {
    const cpu::ExpertTable& table = experts.table;
    const int hidden = table.hidden(), inter = table.intermediate();
    std::atomic<int> ready{0};
    std::vector<double> rates(static_cast<size_t>(threads));
    const auto run = [&](int thread) {
        KernelInput wide(kernels, hidden), narrow(kernels, inter);
        std::vector<float> y(static_cast<size_t>(std::max(hidden, inter)));
        int next = table.experts() * thread / threads;
        const auto multiply = [&](const cpu::ExpertMatrix& matrix, int n, KernelInput& x, int k) {
            const cpu::Gemv gemv{matrix.trellis, n / 16, 0, n / 16, 0, k / cpu::kBlock, 1, x.view(), y.data(), n};
            kernels.gemv[matrix.bits - cpu::kMinBits](&gemv);
        };
        const auto expert = [&] {
            const cpu::Expert& e = table[next];
            multiply(e.gate, inter, wide, hidden);
            multiply(e.up, inter, wide, hidden);
            multiply(e.down, hidden, narrow, inter);
            next = (next + 1) % table.experts();
        };
        expert();
        ++ready;
        while (ready.load() < threads) std::this_thread::yield();
        int count = 0;
        const double begin = now();
        do {
            expert();
            ++count;
        } while (now() - begin < seconds);
        rates[static_cast<size_t>(thread)] = count / (now() - begin);
    };
    std::vector<std::thread> workers;
    for (int t = 0; t < threads; ++t) workers.emplace_back(run, t);
    for (std::thread& worker : workers) worker.join();
    double rate = 0;
    for (const double r : rates) rate += r;
    return 1 / rate;
}

}  // namespace glm53::bench
