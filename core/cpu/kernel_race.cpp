#include "cpu/kernel_race.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace glm53::cpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kBits = 3;
constexpr int kTiles = 64;                              // tile columns: 49 KB of trellis over one block
constexpr int kTurns = 2;                               // of each table; its best run counts
constexpr auto kSettle = std::chrono::milliseconds(1);  // until the clock is what these instructions get
constexpr auto kTurn = std::chrono::microseconds(1500);
constexpr double kClearly = 0.97;

class Piece {
  public:
    explicit Piece(const Kernels& kernels)
        : kernels_(kernels), values_(static_cast<size_t>(kBlock * kernels.words_per_value)), y_(kTiles * 16) {
        // The first value outweighs the others, so that all are positive after their rotation: no table takes the
        // longer way that it may have for values of both signs.
        std::vector<float> x(kBlock);
        for (size_t i = 0; i < x.size(); ++i) x[i] = i == 0 ? 4.0f : 0.015f * (static_cast<float>(i * 11 % 5) - 2.0f);
        const std::vector<uint16_t> ones(kBlock, 0x3c00);
        Activations out = view();
        kernels.quantise(x.data(), ones.data(), &out, 0, 0);
    }
    Clock::duration time(const std::vector<uint8_t>& trellis) {
        std::fill(y_.begin(), y_.end(), 0.0f);
        const Gemv gemv{trellis.data(), kTiles, 0, kTiles, 0, 1, 1, view(), y_.data(), kTiles * 16};
        const auto begin = Clock::now();
        kernels_.gemv[kBits - kMinBits](&gemv);
        return Clock::now() - begin;
    }
    const std::vector<float>& y() const { return y_; }

  private:
    Activations view() { return {values_.data(), &bias_, &scale_, kBlock, true}; }

    const Kernels& kernels_;
    std::vector<int16_t> values_;
    int32_t bias_ = 0;
    float scale_ = 0;
    std::vector<float> y_;
};

}  // namespace

const Kernels& fastest_kernels(std::span<const Kernels* const> tables) {
    std::vector<uint8_t> trellis(kBlockTiles * kTiles * 32 * kBits);
    for (size_t i = 0; i < trellis.size(); ++i) trellis[i] = static_cast<uint8_t>(i * i * 31 >> 4);
    std::vector<Piece> pieces;
    for (const Kernels* table : tables) pieces.emplace_back(*table);
    std::vector<Clock::duration> best(tables.size(), Clock::duration::max());
    for (int turn = 0; turn < kTurns; ++turn) {
        for (size_t t = 0; t < tables.size(); ++t) {
            for (const auto begin = Clock::now(); Clock::now() - begin < kSettle;) pieces[t].time(trellis);
            for (const auto begin = Clock::now(); Clock::now() - begin < kTurn;) {
                best[t] = std::min(best[t], pieces[t].time(trellis));
            }
        }
    }
    size_t first = 0;
    for (size_t t = 1; t < tables.size(); ++t) {
        const bool faster = static_cast<double>(best[t].count()) < kClearly * static_cast<double>(best[first].count());
        if (faster && pieces[t].y() == pieces[first].y()) first = t;
    }
    return *tables[first];
}

}  // namespace glm53::cpu
