// Experts of a real shape to measure on: random trellises, more of them than the caches hold.
#pragma once
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <vector>

#include "common/half.h"
#include "cpu/expert_table.h"

namespace glm53::bench {

// Random trellises in one mapping with huge pages where they are free, as the product's arena has them.
class Experts {
  public:
    Experts(int experts, int hidden, int intermediate, int bits)
        : matrix_bytes_(static_cast<size_t>(hidden) * intermediate * bits / 8),
          bytes_(matrix_bytes_ * 3 * experts),
          table(experts, hidden, intermediate, 10.0f) {
        constexpr size_t kHuge = 2 << 20;
        void* map = mmap(nullptr, bytes_ + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (map == MAP_FAILED) throw std::bad_alloc();
        data_ = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(map) + kHuge - 1) & ~(kHuge - 1));
        madvise(data_, bytes_, MADV_HUGEPAGE);
        std::mt19937_64 random(1);
        for (size_t i = 0; i + 8 <= bytes_; i += 8) {
            const uint64_t word = random();
            std::memcpy(data_ + i, &word, 8);
        }
        const auto in = scales(hidden, 1.4f / std::sqrt(static_cast<float>(hidden)), random);
        const auto in_down = scales(intermediate, 1.0f / std::sqrt(static_cast<float>(intermediate)), random);
        for (int e = 0; e < experts; ++e) {
            for (int part = 0; part < 3; ++part) {
                const bool down = part == 2;
                const std::span trellis(reinterpret_cast<std::byte*>(data_) + (e * 3 + part) * matrix_bytes_,
                                        matrix_bytes_);
                table.set(e, static_cast<cpu::Part>(part), trellis, std::as_bytes(std::span(down ? in_down : in)),
                          std::as_bytes(std::span(scales(down ? hidden : intermediate, 1.0f, random))), bits);
            }
        }
    }
    const uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    const std::vector<uint16_t>& scales(int count, float size, std::mt19937_64& random) {
        auto values = std::make_unique<std::vector<uint16_t>>(count);
        for (uint16_t& v : *values) v = float_to_half(random() & 1 ? size : -size);
        kept_.push_back(std::move(values));
        return *kept_.back();
    }

    size_t matrix_bytes_;
    size_t bytes_;
    uint8_t* data_ = nullptr;
    std::vector<std::unique_ptr<std::vector<uint16_t>>> kept_;

  public:
    cpu::ExpertTable table;
};

}  // namespace glm53::bench
