#include "cpu/dispatch.h"

#include <stdexcept>

#include "common/cpu_info.h"
#include "cpu/kernel_race.h"

namespace glm53::cpu {
namespace {

std::vector<const Kernels*> available() {
    std::vector<const Kernels*> tables;
#if defined(__x86_64__)
    const CpuFeatures& f = cpu_features();
    const bool avx2 = f.avx2 && f.fma && f.f16c;
    const bool avx512 = f.avx512f && f.avx512bw && f.avx512vl && f.avx512dq && f.avx512vbmi && f.avx512vnni;
    if (avx2 && avx512) {
        // Which is faster depends on how many vector ports take which operation; both give the same bits.
        static const bool words = &faster_kernels(kAvx512Kernels, kAvx512WordKernels) == &kAvx512WordKernels;
        tables.push_back(words ? &kAvx512WordKernels : &kAvx512Kernels);
        tables.push_back(words ? &kAvx512Kernels : &kAvx512WordKernels);
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
