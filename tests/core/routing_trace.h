// Synthetic routing for cache tests: top-k of Zipf-like weights plus Gumbel noise, which samples k experts without
// replacement.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

struct RoutingSpec {
    int layers = 8, experts = 288, k = 8, rows = 1, steps = 1000;
    double exponent = 0.62;      // weight of rank r: 1 / (r + 1)^exponent
    int topic_steps = 0;         // every so many steps a new topic shifts all log weights; 0: never
    double topic_deviation = 0;  // standard deviation of that shift
    std::uint64_t seed = 1;
};

// (steps * layers) picks of rows * k expert ids.
inline std::vector<std::vector<std::int64_t>> make_routing(const RoutingSpec& spec) {
    std::mt19937_64 random(spec.seed);
    std::uniform_real_distribution<double> uniform(1e-12, 1.0);
    std::normal_distribution<double> normal;
    const std::size_t experts = static_cast<std::size_t>(spec.experts);
    std::vector<std::vector<double>> base(spec.layers, std::vector<double>(experts)), topic = base;
    for (auto& layer : base) {
        std::vector<int> order(experts);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        for (int r = 0; r < spec.experts; ++r) layer[order[r]] = -spec.exponent * std::log(r + 1.0);
    }
    std::vector<std::vector<std::int64_t>> trace;
    std::vector<std::pair<double, int>> scores(experts);
    for (int step = 0; step < spec.steps; ++step) {
        const bool new_topic = spec.topic_steps > 0 && step % spec.topic_steps == 0;
        for (int layer = 0; layer < spec.layers; ++layer) {
            for (auto& t : topic[layer]) t = new_topic ? spec.topic_deviation * normal(random) : t;
            std::vector<std::int64_t> picks;
            for (int row = 0; row < spec.rows; ++row) {
                for (int e = 0; e < spec.experts; ++e) {
                    scores[e] = {base[layer][e] + topic[layer][e] - std::log(-std::log(uniform(random))), e};
                }
                std::partial_sort(scores.begin(), scores.begin() + spec.k, scores.end(), std::greater<>());
                for (int i = 0; i < spec.k; ++i) picks.push_back(scores[i].second);
            }
            trace.push_back(std::move(picks));
        }
    }
    return trace;
}

inline std::vector<std::int64_t> unique_picks(std::vector<std::int64_t> picks) {
    std::sort(picks.begin(), picks.end());
    picks.erase(std::unique(picks.begin(), picks.end()), picks.end());
    return picks;
}

// Misses per layer and step, from step `from` on, of the `per_layer` experts that those steps pick most, held fixed.
inline double hottest_fixed_misses(const std::vector<std::vector<std::int64_t>>& trace, const RoutingSpec& spec,
                                   int per_layer, int from) {
    double misses = 0;
    for (int layer = 0; layer < spec.layers; ++layer) {
        std::vector<int> count(static_cast<std::size_t>(spec.experts));
        for (int step = from; step < spec.steps; ++step) {
            for (const auto e : unique_picks(trace[step * spec.layers + layer])) ++count[static_cast<std::size_t>(e)];
        }
        std::sort(count.begin(), count.end(), std::greater<>());
        misses += std::accumulate(count.begin() + per_layer, count.end(), 0.0);
    }
    return misses / (static_cast<double>(spec.layers) * (spec.steps - from));
}
