// Hadamard rotation, int16 rounding and SwiGLU of 128-channel blocks with AVX2.
#include "cpu/block_avx2.h"

#include <immintrin.h>

#include "exl3/constants.h"

namespace glm53::cpu {
namespace {

constexpr int kVectors = kBlock / 8;

// One Hadamard step between the lanes of a vector: partner holds each lane's partner, sign is -1 where the lane is the
// second of its pair.
inline __m256 butterfly(__m256 v, __m256 partner, __m256 sign) {
    return _mm256_fmadd_ps(v, sign, partner);
}

// 128-point Hadamard, Sylvester order, not scaled.
inline void hadamard(__m256 v[kVectors]) {
    for (int width = 1; width < kVectors; width *= 2) {
        for (int i = 0; i < kVectors; ++i) {
            if (i & width) continue;
            const __m256 a = v[i];
            const __m256 b = v[i + width];
            v[i] = _mm256_add_ps(a, b);
            v[i + width] = _mm256_sub_ps(a, b);
        }
    }
    const __m256 sign1 = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
    const __m256 sign2 = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
    const __m256 sign4 = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);
    for (int i = 0; i < kVectors; ++i) {
        __m256 r = v[i];
        r = butterfly(r, _mm256_permute_ps(r, 0xb1), sign1);
        r = butterfly(r, _mm256_permute_ps(r, 0x4e), sign2);
        v[i] = butterfly(r, _mm256_permute2f128_ps(r, r, 0x01), sign4);
    }
}

inline __m256 load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline float horizontal_sum(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline float horizontal_max(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline int32_t horizontal_sum(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// Rounds 128 values to int16, returns their sum.
inline int32_t round_block(const __m256 v[kVectors], __m256 inverse, int16_t* out) {
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < kVectors; i += 2) {
        const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(v[i + 1], inverse));
        sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * 8), packed);
    }
    return horizontal_sum(sum);
}

// exp(x) to about 1e-7 for x <= 88; below -87 the result stays at exp(-87). 2^n times a Taylor polynomial of
// exp(r), r = x - n ln 2, |r| <= ln 2 / 2; ln 2 in two parts so that n ln 2 loses nothing.
inline __m256 exponential(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(-87.0f), _mm256_min_ps(_mm256_set1_ps(88.0f), x));  // NaN passes both
    const __m256 n =
        _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    constexpr float kInverseFactorials[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (const float c : kInverseFactorials) {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    }
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

}  // namespace

void swiglu_avx2(float* gate, const float* up, float limit) {
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 high = _mm256_set1_ps(limit > 0.0f ? limit : __builtin_inff());
    const __m256 low = _mm256_sub_ps(_mm256_setzero_ps(), high);
    for (int i = 0; i < kBlock; i += 8) {
        const __m256 g = _mm256_loadu_ps(gate + i);
        const __m256 denominator = _mm256_add_ps(one, exponential(_mm256_sub_ps(_mm256_setzero_ps(), g)));
        // min and max return their second operand where either is NaN.
        const __m256 silu = _mm256_min_ps(high, _mm256_div_ps(g, denominator));
        const __m256 u = _mm256_max_ps(low, _mm256_min_ps(high, _mm256_loadu_ps(up + i)));
        _mm256_storeu_ps(gate + i, _mm256_mul_ps(silu, u));
    }
}

float quantise_block_avx2(const float* x, const uint16_t* suh, int16_t* values, int32_t* bias, float* scale) {
    __m256 v[kVectors];
    for (int i = 0; i < kVectors; ++i) v[i] = _mm256_mul_ps(_mm256_loadu_ps(x + i * 8), load_half(suh + i * 8));
    hadamard(v);
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 largest = _mm256_setzero_ps();
    __m256 sum = _mm256_setzero_ps();
    for (const __m256& value : v) {
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, value));
        sum = _mm256_add_ps(sum, value);
    }
    const float total = horizontal_sum(sum);
    const float top = horizontal_max(largest);
    // A NaN or inf anywhere in the block makes every rotated value non-finite, so the sum shows it.
    const bool finite = total - total == 0.0f && top - top == 0.0f;
    const float step = finite && top > 0.0f ? top / 32767.0f : 1.0f;
    const __m256 inverse = _mm256_set1_ps(1.0f / step);
    if (!finite) {
        for (__m256& value : v) value = _mm256_setzero_ps();
    }
    *bias = -exl3::kMul1Centre * round_block(v, inverse, values);
    *scale = (finite ? step : __builtin_nanf("")) * exl3::kMul1Step * exl3::kHadamardScale;
    return exl3::kMul1Offset * exl3::kHadamardScale * total;
}

void rotate_out_avx2(float* y, float offset, const uint16_t* svh) {
    __m256 v[kVectors];
    for (int i = 0; i < kVectors; ++i) v[i] = _mm256_add_ps(_mm256_loadu_ps(y + i * 8), _mm256_set1_ps(offset));
    hadamard(v);
    const __m256 scale = _mm256_set1_ps(exl3::kHadamardScale);
    for (int i = 0; i < kVectors; ++i) {
        _mm256_storeu_ps(y + i * 8, _mm256_mul_ps(_mm256_mul_ps(v[i], scale), load_half(svh + i * 8)));
    }
}

}  // namespace glm53::cpu
