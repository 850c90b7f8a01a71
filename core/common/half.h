// IEEE 754 binary16 as uint16_t bits, in plain integer arithmetic: the host files are built without F16C.
#pragma once
#include <bit>
#include <cstdint>

namespace glm53 {

// Exact.
inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude < 0x0400u) {  // zero and subnormals: a multiple of 2^-24
        const float value = static_cast<float>(magnitude) * 0x1p-24f;
        return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
    }
    const uint32_t rebias = magnitude >= 0x7c00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
    return std::bit_cast<float>(((magnitude << 13) + rebias) | sign);
}

// Rounds to nearest, ties to even; overflows to infinity; NaN stays NaN.
inline uint16_t float_to_half(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half = 0;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves a multiple of 2^-24 in the low bits
        half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
    }
    return static_cast<uint16_t>(half | sign);
}

}  // namespace glm53
