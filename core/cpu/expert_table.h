// ExpertTable: where the routed experts of one layer lie in memory. It owns no weights; whoever fills it keeps the
// memory alive for as long as the table is used.
//
// States: an expert is incomplete until gate, up and down are set; CpuMoe refuses to compute an incomplete one.
// Threads: set() must not run while a forward reads the table. Costs: 104 bytes an expert.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace glm53::cpu {

enum class Part { kGate, kUp, kDown };

// One quantised matrix (mul1 codebook) of k inputs and n outputs: trellis (k/16, n/16, 16 bits) uint16, suh (k) fp16,
// svh (n) fp16; the trellis of any alignment, the vectors at even addresses.
struct ExpertMatrix {
    const uint8_t* trellis = nullptr;
    const uint16_t* suh = nullptr;
    const uint16_t* svh = nullptr;
    int bits = 0;
};

struct Expert {
    ExpertMatrix gate, up, down;
    size_t trellis_bytes = 0;
    bool complete() const { return gate.trellis && up.trellis && down.trellis; }
};

class ExpertTable {
  public:
    // hidden, intermediate: channels, multiples of 128. limit: the SwiGLU clamp, 0 for none. Throws
    // std::invalid_argument for sizes that the kernels cannot take.
    ExpertTable(int64_t experts, int64_t hidden, int64_t intermediate, float limit);

    // Points one matrix of an expert at memory. The sizes are in bytes and must be exactly those of the shape: a wrong
    // one throws std::invalid_argument, an unknown expert std::out_of_range.
    void set(int64_t expert, Part part, std::span<const std::byte> trellis, std::span<const std::byte> suh,
             std::span<const std::byte> svh, int bits);

    int experts() const { return static_cast<int>(experts_.size()); }
    int hidden() const { return hidden_; }
    int intermediate() const { return intermediate_; }
    float limit() const { return limit_; }
    const Expert& operator[](int expert) const { return experts_[static_cast<size_t>(expert)]; }

  private:
    int hidden_;
    int intermediate_;
    float limit_;
    std::vector<Expert> experts_;
};

}  // namespace glm53::cpu
