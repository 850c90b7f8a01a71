#include "cpu/dispatch.h"

#include <algorithm>
#include <stdexcept>

#include "common/cpu_info.h"
#include "cpu/kernel_race.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace glm53::cpu {
namespace {

#if defined(__x86_64__)
// Linux lets a process use AMX tiles only once it has asked, for all its threads (arch_prctl(2)).
bool request_tiles() {
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// The AVX-512 tables, the fastest in front: which that is depends on how many vector ports take which operation, and on
// what the tile unit costs the clock. All give the same bits.
std::vector<const Kernels*> rank_avx512() {
    std::vector<const Kernels*> tables = {&kAvx512Kernels, &kAvx512WordKernels};
    if (cpu_features().amx_int8 && request_tiles()) tables.push_back(&kAmxKernels);
    const auto fastest = std::find(tables.begin(), tables.end(), &fastest_kernels(tables));
    std::rotate(tables.begin(), fastest, fastest + 1);
    return tables;
}
#endif

std::vector<const Kernels*> available() {
    std::vector<const Kernels*> tables;
#if defined(__x86_64__)
    const CpuFeatures& f = cpu_features();
    const bool avx2 = f.avx2 && f.fma && f.f16c;
    const bool avx512 = f.avx512f && f.avx512bw && f.avx512vl && f.avx512dq && f.avx512vbmi && f.avx512vnni;
    if (avx2 && avx512) {
        static const std::vector<const Kernels*> ranked = rank_avx512();
        tables = ranked;
    }
    if (avx2) tables.push_back(&kAvx2Kernels);
#endif
    tables.push_back(&kScalarKernels);
    return tables;
}

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Kernels* table : available()) names.emplace_back(table->name);
    return names;
}

const Kernels& select_kernels(std::string_view isa) {
    const std::vector<const Kernels*> tables = available();
    if (isa == "auto") return *tables.front();
    std::string names;
    for (const Kernels* table : tables) {
        if (isa == table->name) return *table;
        names += std::string(names.empty() ? "" : ", ") + table->name;
    }
    throw std::invalid_argument("no CPU kernels '" + std::string(isa) + "' here: this processor runs " + names);
}

}  // namespace glm53::cpu
