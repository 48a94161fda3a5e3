// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <utility>

#include "dynmo/plan/memory_ladder_impl.h"

namespace dynmo::plan::internal {

Bytes rung(Bytes memory, int below) {
  constexpr int kBits = 4;  // 8 to 15 times a power of two
  if (memory >= cost::kUnlimitedMemory || memory <= Bytes{0}) return memory;
  const auto value = static_cast<std::uint64_t>(memory.value);
  int shift = std::max(0, static_cast<int>(std::bit_width(value)) - kBits);
  std::int64_t steps = static_cast<std::int64_t>(value >> shift);
  for (; below > 0; --below) {
    --steps;
    if (steps >= 8 || shift == 0) continue;
    steps = 15;
    --shift;
  }
  return Bytes{std::max<std::int64_t>(steps, 0) << shift};
}

cost::Cluster at_rung(cost::Cluster cluster, int below) {
  for (cost::ClusterRank& rank : cluster.ranks) rank.memory = rung(rank.memory, below);
  return cluster;
}

}  // namespace dynmo::plan::internal
