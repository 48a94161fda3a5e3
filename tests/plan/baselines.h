// SPDX-License-Identifier: Apache-2.0
#pragma once

// BASELINES, for tests and benchmarks only: the partition searches of the systems that came before,
// re-implemented from their descriptions.

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

namespace dynmo::plan::baseline {

inline double bottleneck(const std::vector<double>& weights, const std::vector<int>& counts) {
  double most = 0;
  auto layer = weights.begin();
  for (const int count : counts) {
    most = std::max(most, std::accumulate(layer, layer + count, 0.0));
    layer += count;
  }
  return most;
}

// DeepSpeed's balanced partition: a dynamic program that keeps one (largest, least) pair a state,
// (layers, parts), and takes the last cut with the least spread, ties to the later one. Spread has
// no optimal substructure, so the result need not be the best. Every part non-empty.
inline std::vector<int> deepspeed(const std::vector<double>& weights, int parts) {
  const std::size_t n = weights.size();
  struct State {
    double most = 0;
    double least = 0;
    std::size_t cut = 0;
    bool reached = false;
  };
  std::vector<double> prefix(n + 1, 0);
  for (std::size_t i = 0; i < n; ++i) prefix[i + 1] = prefix[i] + weights[i];
  std::vector<std::vector<State>> table(static_cast<std::size_t>(parts) + 1,
                                        std::vector<State>(n + 1));
  for (std::size_t i = 1; i <= n; ++i) table[1][i] = {prefix[i], prefix[i], 0, true};
  for (std::size_t j = 2; j < table.size(); ++j) {
    for (std::size_t i = j; i <= n; ++i) {
      State& best = table[j][i];
      for (std::size_t k = j - 1; k < i; ++k) {
        const State& before = table[j - 1][k];
        if (!before.reached) continue;
        const double segment = prefix[i] - prefix[k];
        const double most = std::max(before.most, segment);
        const double least = std::min(before.least, segment);
        if (best.reached && most - least > best.most - best.least) continue;
        best = {most, least, k, true};
      }
    }
  }
  std::vector<int> counts(static_cast<std::size_t>(parts), 0);
  std::size_t end = n;
  for (std::size_t j = static_cast<std::size_t>(parts); j > 0; --j) {
    counts[j - 1] = static_cast<int>(end - table[j][end].cut);
    end = table[j][end].cut;
  }
  return counts;
}

// The original DynMo's (after older DeepSpeed code): bisection on the bottleneck to a thousandth of
// the sum, greedy filling as the probe. Parts may come out empty.
inline std::vector<int> original_dynmo(const std::vector<double>& weights, int parts) {
  const auto fill = [&](double limit) {
    std::vector<int> counts(1, 0);
    double load = 0;
    for (const double weight : weights) {
      if (load + weight > limit && counts.back() > 0) {
        counts.push_back(0);
        load = 0;
      }
      load += weight;
      ++counts.back();
    }
    return counts;
  };
  double low = *std::max_element(weights.begin(), weights.end());
  double high = std::accumulate(weights.begin(), weights.end(), 0.0);
  const double precision = high / 1000;
  while (high - low > precision) {
    const double middle = low + (high - low) / 2;
    (fill(middle).size() <= static_cast<std::size_t>(parts) ? high : low) = middle;
  }
  std::vector<int> counts = fill(high);
  counts.resize(static_cast<std::size_t>(parts), 0);
  return counts;
}

}  // namespace dynmo::plan::baseline
