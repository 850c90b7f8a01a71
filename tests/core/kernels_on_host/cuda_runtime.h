// What our .cu files use of CUDA's header of this name.
#pragma once
#include "grid.h"

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };

inline cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
inline const char* cudaGetErrorName(cudaError_t) {
    return "";
}
inline const char* cudaGetErrorString(cudaError_t) {
    return "";
}
