#include "cpu/dispatch.h"

#include <stdexcept>
#include <utility>

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

// The AVX-512 tables, the faster of the first two in front: which that is depends on how many vector ports take which
// operation. All give the same bits. AMX is for who names it: its products alone are the fastest, whole layers with it
// have not been.
std::vector<const Kernels*> rank_avx512() {
    const bool words = &faster_kernels(kAvx512Kernels, kAvx512WordKernels) == &kAvx512WordKernels;
    std::vector<const Kernels*> tables = {&kAvx512Kernels, &kAvx512WordKernels};
    if (words) std::swap(tables[0], tables[1]);
    if (cpu_features().amx_int8 && request_tiles()) tables.push_back(&kAmxKernels);
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
