#include "cpu/expert_table.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "cpu/kernels.h"

namespace glm53::cpu {
namespace {

constexpr int64_t kMaxChannels = 1 << 20;
constexpr int64_t kMaxExperts = 1 << 16;

int channels(const char* what, int64_t value) {
    if (value < kBlock || value % kBlock != 0 || value > kMaxChannels) {
        throw std::invalid_argument("an expert's " + std::string(what) +
                                    " size must be a multiple of 128 from 128 to " + std::to_string(kMaxChannels) +
                                    ", not " + std::to_string(value));
    }
    return static_cast<int>(value);
}

void check_bytes(const std::string& what, size_t actual, int64_t expected) {
    if (actual != static_cast<size_t>(expected)) {
        throw std::invalid_argument(what + ": " + std::to_string(actual) + " bytes, expected " +
                                    std::to_string(expected));
    }
}

const char* part_name(Part part) {
    switch (part) {
        case Part::kGate:
            return "gate";
        case Part::kUp:
            return "up";
        case Part::kDown:
            break;
    }
    return "down";
}

}  // namespace

ExpertTable::ExpertTable(int64_t experts, int64_t hidden, int64_t intermediate, float limit)
    : hidden_(channels("hidden", hidden)), intermediate_(channels("intermediate", intermediate)), limit_(limit) {
    if (experts < 1 || experts > kMaxExperts) {
        throw std::invalid_argument("an expert table holds 1 to 65536 experts, not " + std::to_string(experts));
    }
    if (!(limit >= 0.0f) || std::isinf(limit)) {
        throw std::invalid_argument("the SwiGLU limit must be 0 (none) or positive, not " + std::to_string(limit));
    }
    experts_.resize(static_cast<size_t>(experts));
}

void ExpertTable::set(int64_t expert, Part part, std::span<const std::byte> trellis, std::span<const std::byte> suh,
                      std::span<const std::byte> svh, int bits) {
    if (expert < 0 || expert >= experts()) {
        throw std::out_of_range("expert " + std::to_string(expert) + " of a table of " + std::to_string(experts()));
    }
    const std::string name = "expert " + std::to_string(expert) + " " + part_name(part);
    if (bits < kMinBits || bits > kMaxBits) {
        throw std::invalid_argument(name + ": the CPU kernels take K = 2, 3 or 4, not " + std::to_string(bits));
    }
    const int64_t k = part == Part::kDown ? intermediate_ : hidden_;
    const int64_t n = part == Part::kDown ? hidden_ : intermediate_;
    check_bytes(name + " trellis", trellis.size(), k * n * bits / 8);
    check_bytes(name + " suh", suh.size(), k * 2);
    check_bytes(name + " svh", svh.size(), n * 2);
    if (!trellis.data() || !suh.data() || !svh.data()) throw std::invalid_argument(name + ": null address");
    if ((reinterpret_cast<uintptr_t>(suh.data()) | reinterpret_cast<uintptr_t>(svh.data())) % alignof(uint16_t)) {
        throw std::invalid_argument(name + ": suh and svh must lie at even addresses");
    }
    Expert& e = experts_[static_cast<size_t>(expert)];
    ExpertMatrix& matrix = part == Part::kGate ? e.gate : part == Part::kUp ? e.up : e.down;
    e.trellis_bytes -= matrix.trellis ? static_cast<size_t>(k * n * matrix.bits / 8) : 0;
    matrix = {reinterpret_cast<const uint8_t*>(trellis.data()), reinterpret_cast<const uint16_t*>(suh.data()),
              reinterpret_cast<const uint16_t*>(svh.data()), bits};
    e.trellis_bytes += trellis.size();
}

}  // namespace glm53::cpu
