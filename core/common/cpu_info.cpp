#include "common/cpu_info.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <string>

namespace glm53 {
namespace {

CpuFeatures read_features() {
    CpuFeatures f;
#if defined(__x86_64__)
    __builtin_cpu_init();
    f.avx2 = __builtin_cpu_supports("avx2");
    f.fma = __builtin_cpu_supports("fma");
    f.f16c = __builtin_cpu_supports("f16c");
    f.avx512f = __builtin_cpu_supports("avx512f");
    f.avx512bw = __builtin_cpu_supports("avx512bw");
    f.avx512vl = __builtin_cpu_supports("avx512vl");
    f.avx512dq = __builtin_cpu_supports("avx512dq");
    f.avx512vbmi = __builtin_cpu_supports("avx512vbmi");
    f.avx512vnni = __builtin_cpu_supports("avx512vnni");
    f.amx_int8 = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8");
#endif
    return f;
}

// The first line of a small file, empty if it cannot be read.
std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// CPUs' worth of time this cgroup (v2) may use, 0 where there is no limit.
int cgroup_quota() {
    std::string quota;
    double period = 0;
    std::ifstream file("/sys/fs/cgroup/cpu.max");
    if (!(file >> quota >> period) || quota == "max" || period <= 0) return 0;
    return std::max(1, static_cast<int>(std::ceil(std::stod(quota) / period)));
}

}  // namespace

const CpuFeatures& cpu_features() {
    static const CpuFeatures features = read_features();
    return features;
}

std::vector<int> allowed_cpus() {
    std::vector<int> cpus;
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
        }
    }
    return cpus;
}

std::vector<int> physical_cpus() {
    std::vector<int> cpus;
    std::set<std::string> cores;
    for (const int cpu : allowed_cpus()) {
        const std::string siblings =
            first_line("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        if (siblings.empty() || cores.insert(siblings).second) cpus.push_back(cpu);
    }
    return cpus;
}

int default_threads() {
    const int cores = std::max(1, static_cast<int>(physical_cpus().size()));
    const int quota = cgroup_quota();
    return quota > 0 ? std::min(cores, quota) : cores;
}

}  // namespace glm53
