// Clocks of a benchmark: seconds, the core's frequency, and how fast memory can be read.
#pragma once
#include <immintrin.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace glm53::bench {

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Cycles per second of this core, from a chain of dependent multiplications (three cycles each on every core with AVX2;
// newer ones fold additions of a constant away).
inline double clock_hz() {
    constexpr int kSteps = 100'000;
    uint64_t value = 3;
    const double begin = now();
    for (int i = 0; i < kSteps; ++i) {
        asm volatile("imul %0, %0\n imul %0, %0\n imul %0, %0\n imul %0, %0\n" : "+r"(value));
    }
    return 3.0 * 4.0 * kSteps / (now() - begin);
}

// Reads every byte once.
__attribute__((target("avx2"))) inline uint64_t read_all(const uint8_t* bytes, size_t count) {
    __m256i sums[4] = {};
    for (size_t i = 0; i + 128 <= count; i += 128) {
        _mm_prefetch(reinterpret_cast<const char*>(bytes + i + 1024), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(bytes + i + 1088), _MM_HINT_T0);
        for (size_t j = 0; j < 4; ++j) {
            const auto* p = reinterpret_cast<const __m256i*>(bytes + i + 32 * j);
            sums[j] = _mm256_xor_si256(sums[j], _mm256_loadu_si256(p));
        }
    }
    const __m256i all = _mm256_xor_si256(_mm256_xor_si256(sums[0], sums[1]), _mm256_xor_si256(sums[2], sums[3]));
    alignas(32) uint64_t words[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), all);
    return words[0] ^ words[1] ^ words[2] ^ words[3];
}

}  // namespace glm53::bench
