// The choice of a kernel by its number of rows, which the instruction-set files share (internal): each compiles its
// own copy with its own flags, so all of it has internal linkage.
#pragma once
#include "cpu/kernels.h"

namespace glm53::cpu {
namespace {

// Kernel<Bits, Rows>::multiply(gemv), for the rows that gemv has.
template <template <int, int> class Kernel, int Bits>
void gemv(const Gemv* g) {
    using Multiply = void (*)(const Gemv&);
    static constexpr Multiply kByRows[kMaxRows] = {
        Kernel<Bits, 1>::multiply, Kernel<Bits, 2>::multiply, Kernel<Bits, 3>::multiply, Kernel<Bits, 4>::multiply,
        Kernel<Bits, 5>::multiply, Kernel<Bits, 6>::multiply, Kernel<Bits, 7>::multiply, Kernel<Bits, 8>::multiply};
    kByRows[g->rows - 1](*g);
}

}  // namespace
}  // namespace glm53::cpu
