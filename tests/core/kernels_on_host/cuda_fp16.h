// What our .cu files use of CUDA's header of this name.
#pragma once
#include "common/half.h"
#include "grid.h"

struct __half {
    std::uint16_t bits;
};
struct alignas(4) __half2 {
    __half x, y;
};

inline float __half2float(__half value) {
    return glm53::half_to_float(value.bits);
}
inline __half __float2half_rn(float value) {
    return {glm53::float_to_half(value)};
}
inline float2 __half22float2(__half2 value) {
    return {__half2float(value.x), __half2float(value.y)};
}
inline __half2 __floats2half2_rn(float x, float y) {
    return {__float2half_rn(x), __float2half_rn(y)};
}
