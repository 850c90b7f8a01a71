// What this machine's processor can do and which logical CPUs this process may use.
#pragma once
#include <vector>

namespace glm53 {

// Instruction sets usable here: offered by the processor and enabled by the operating system.
struct CpuFeatures {
    bool avx2 = false;
    bool fma = false;
    bool f16c = false;
    bool avx512f = false;
    bool avx512bw = false;
    bool avx512vl = false;
    bool avx512dq = false;
    bool avx512vbmi = false;
    bool avx512vnni = false;
    bool amx_int8 = false;  // with its tiles; a process must ask for them besides (cpu/dispatch.cpp)
};

// Read from cpuid once.
const CpuFeatures& cpu_features();

// Logical CPUs in this process's affinity mask, ascending.
std::vector<int> allowed_cpus();

// One logical CPU (the lowest) of each physical core in the affinity mask, ascending. Where the topology is not
// readable every allowed CPU counts as a core.
std::vector<int> physical_cpus();

// Workers to use where nobody says: one per physical core, no more than the cgroup's CPU quota; at least 1.
int default_threads();

}  // namespace glm53
