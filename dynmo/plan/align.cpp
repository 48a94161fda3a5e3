// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/plan/assignment_impl.h"
#include "dynmo/plan/migration.h"

namespace dynmo::plan {
namespace {

// Ranks that may take each other's place, ascending.
std::vector<std::vector<std::size_t>> equal_ranks(const cost::Cluster& cluster) {
  std::map<std::tuple<double, Bytes, int>, std::vector<std::size_t>> classes;
  for (std::size_t r = 0; r < cluster.ranks.size(); ++r) {
    const cost::ClusterRank& rank = cluster.ranks[r];
    classes[{rank.speed, rank.memory, rank.node}].push_back(r);
  }
  std::vector<std::vector<std::size_t>> groups;
  for (auto& [key, ranks] : classes) groups.push_back(std::move(ranks));
  return groups;
}

}  // namespace

Plan align(const Plan& plan, const Plan& from, const cost::Cluster& cluster,
           const cost::ModelCost& model) {
  DYNMO_CHECK(plan.ranks == cluster.size() && from.ranks == cluster.size(),
              "two plans for {} ranks, got {} and {}", cluster.size(), plan.ranks, from.ranks);
  // Bytes that stay where they are if `plan`'s rank r is called q.
  std::map<std::pair<std::size_t, std::size_t>, std::int64_t> kept;
  const std::vector<Rank> now = owners(from);
  const std::vector<Rank> then = owners(plan);
  for (std::size_t layer = 0; layer < now.size(); ++layer) {
    kept[{then[layer].index(), now[layer].index()}] += moved_bytes(model.layers[layer]).value;
  }
  std::vector<Rank> name(cluster.ranks.size());
  for (const std::vector<std::size_t>& group : equal_ranks(cluster)) {
    const std::size_t n = group.size();
    Scores scores(n, std::vector<Score>(n, 0));
    for (std::size_t i = 0; i < n; ++i) {
      scores[i][i] = 1;
      for (std::size_t j = 0; j < n; ++j) {
        const auto found = kept.find({group[i], group[j]});
        if (found == kept.end()) continue;
        scores[i][j] += static_cast<Score>(found->second) * static_cast<Score>(n + 1);
      }
    }
    const auto chosen = assignment(scores);
    for (std::size_t i = 0; i < n; ++i) {
      name[group[i]] = Rank{static_cast<std::int32_t>(group[chosen[i]])};
    }
  }
  return renamed(plan, name);
}

}  // namespace dynmo::plan
