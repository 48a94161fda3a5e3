// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/traffic_tensor.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

namespace dynmo::observe {

tensor::SparseTensor tensor_of(const std::vector<TrafficInterval>& intervals) {
  std::int32_t last = 0;
  for (const TrafficInterval& one : intervals) {
    for (const int rank : one.ranks) last = std::max(last, rank);
  }
  const auto size = static_cast<std::uint64_t>(last) + 1;
  tensor::SparseTensor tensor{.sizes = {intervals.size(), size, size},
                              .names = {"interval", "from", "to"},
                              .indices = {{}, {}, {}}};
  for (std::size_t i = 0; i < intervals.size(); ++i) {
    std::map<std::pair<WorldRank, WorldRank>, Bytes> pairs;
    for (const dynmo::TrafficRow& row : intervals[i].measured) {
      if (row.purpose != Purpose::kControl) pairs[{row.from, row.to}] += row.count.bytes;
    }
    for (const auto& [pair, bytes] : pairs) {
      tensor.indices[0].push_back(static_cast<std::uint32_t>(i));
      tensor.indices[1].push_back(static_cast<std::uint32_t>(pair.first.value));
      tensor.indices[2].push_back(static_cast<std::uint32_t>(pair.second.value));
      tensor.values.push_back(static_cast<double>(bytes.value));
    }
  }
  return tensor;
}

}  // namespace dynmo::observe
