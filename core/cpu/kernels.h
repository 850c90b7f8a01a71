// CPU kernels of a routed expert (EXL3, mul1 codebook, K = 2, 3, 4), one table of functions per instruction set.
//
// A product y = x W_inner runs on int16 activations. Per row and block of 128 k-channels, x is rotated (times suh,
// Hadamard) and rounded to int16 with one scale. A weight is taken as (byte sum of its state - 510) * step, so a block
// is an exact int32 sum of 128 terms of at most 510 * 32767; the constant that this leaves out of the fp16 codebook
// (exl3::kMul1Offset times the sum of x) is one number per row, added to every output before its Hadamard.
// All kernels read the trellis in its on-disk order and touch no byte outside it.
//
// The scalar table is the oracle of the others. States: none; the tables are constant.
// This header stays free of templates and inline functions: the instruction-set files include it with other flags.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace glm53::cpu {

constexpr int kBlock = 128;     // channels of one Hadamard block and of one activation scale
constexpr int kBlockTiles = 8;  // tile rows (or columns) of a block
constexpr int kMaxRows = 8;     // activation rows of one kernel call
constexpr int kMinBits = 2;
constexpr int kMaxBits = 4;

// Activations of `rows` rows, ready for a product.
struct Activations {
    int16_t* values;   // row r starts at r * stride * kernels.words_per_value; order: the kernel's own
    int32_t* bias;     // (rows, stride / 128): -510 * (sum of the block's int16 values)
    float* scale;      // (rows, stride / 128): weight step * block scale / sqrt(128)
    ptrdiff_t stride;  // channels of a row, a multiple of 128
    bool one_row;      // laid out for calls with rows == 1 (a kernel may prefer another order then)
};

// y[r][n] += (x W_inner)[r][n], for rows r in [0, rows) and n in the tile columns [n_begin, n_end), summed over the
// blocks [block_begin, block_end) of k. y carries no kMul1Offset term.
struct Gemv {
    const uint8_t* trellis;  // (k / 16, n_tiles, 32 K bytes) of any alignment
    int n_tiles;
    int n_begin, n_end;
    int block_begin, block_end;
    int rows;  // 1 .. kMaxRows
    Activations x;
    float* y;  // row r, column n at r * y_stride + n
    ptrdiff_t y_stride;
};

struct Kernels {
    const char* name;
    int words_per_value;  // int16 words an activation may take in Activations.values

    // Rotates and rounds block `block` of row `row`: x (128 floats), suh (128 fp16 bits). Returns the row's share of
    // the offset: kMul1Offset * sum(rotated x). A block that holds inf or NaN gets a NaN scale.
    float (*quantise)(const float* x, const uint16_t* suh, Activations* out, int row, int block);
    void (*gemv[kMaxBits - kMinBits + 1])(const Gemv* gemv);  // by K - kMinBits
    // y (128 floats) := Hadamard(y + offset) / sqrt(128) * svh (128 fp16 bits)
    void (*rotate_out)(float* y, float offset, const uint16_t* svh);
    // gate (128 floats) := min(silu(gate), limit) * clamp(up, -limit, limit), exllamav3's order; limit 0: no clamp.
    // NaN stays NaN.
    void (*swiglu)(float* gate, const float* up, float limit);
};

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;        // needs AVX2, FMA, F16C
extern const Kernels kAvx512Kernels;      // needs AVX-512 F, BW, VL, DQ, VBMI, VNNI besides
extern const Kernels kAvx512WordKernels;  // needs the same; other instructions, for other processors
extern const Kernels kAmxKernels;         // needs AMX int8 besides, and the process's permission to use tiles
#endif

}  // namespace glm53::cpu
