// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "dynmo/core/check.h"
#include "dynmo/plan/migration.h"

namespace dynmo::plan {
namespace {

constexpr std::size_t kMaxExact = 512;

__extension__ typedef __int128 Score;
using Scores = std::vector<std::vector<Score>>;  // square

// Column of each row with the greatest sum: the Hungarian method by shortest augmenting paths
// (Jonker and Volgenant 1987), on costs = -score. Row and column 0 of its arrays are sentinels.
std::vector<std::size_t> best_assignment(const Scores& scores) {
  constexpr Score kFar = static_cast<Score>(1) << 120;
  const std::size_t n = scores.size();
  std::vector<Score> row_potential(n + 1, 0);
  std::vector<Score> column_potential(n + 1, 0);
  std::vector<std::size_t> row_of(n + 1, 0);
  for (std::size_t row = 1; row <= n; ++row) {
    std::vector<Score> distance(n + 1, kFar);
    std::vector<std::size_t> before(n + 1, 0);
    std::vector<char> done(n + 1, 0);
    row_of[0] = row;
    std::size_t column = 0;
    while (row_of[column] != 0) {
      done[column] = 1;
      const std::size_t from = row_of[column];
      std::size_t nearest = 0;
      for (std::size_t c = 1; c <= n; ++c) {
        if (done[c]) continue;
        const Score reduced = -scores[from - 1][c - 1] - row_potential[from] - column_potential[c];
        if (reduced < distance[c]) {
          distance[c] = reduced;
          before[c] = column;
        }
        if (nearest == 0 || distance[c] < distance[nearest]) nearest = c;
      }
      const Score step = distance[nearest];
      for (std::size_t c = 0; c <= n; ++c) {
        if (done[c]) {
          row_potential[row_of[c]] += step;
          column_potential[c] -= step;
        } else {
          distance[c] -= step;
        }
      }
      column = nearest;
    }
    for (; column != 0; column = before[column]) row_of[column] = row_of[before[column]];
  }
  std::vector<std::size_t> column_of(n, 0);
  for (std::size_t c = 1; c <= n; ++c) column_of[row_of[c] - 1] = c - 1;
  return column_of;
}

std::vector<std::size_t> greedy_assignment(const Scores& scores) {
  const std::size_t n = scores.size();
  std::vector<std::tuple<Score, std::size_t, std::size_t>> pairs;  // -score, row, column
  for (std::size_t row = 0; row < n; ++row) {
    for (std::size_t column = 0; column < n; ++column) {
      if (scores[row][column] > 0) pairs.emplace_back(-scores[row][column], row, column);
    }
  }
  std::sort(pairs.begin(), pairs.end());
  std::vector<std::size_t> column_of(n, n);
  std::vector<char> taken(n, 0);
  for (const auto& [score, row, column] : pairs) {
    if (column_of[row] != n || taken[column]) continue;
    column_of[row] = column;
    taken[column] = 1;
  }
  std::size_t open = 0;
  for (std::size_t row = 0; row < n; ++row) {
    if (column_of[row] != n) continue;
    while (taken[open]) ++open;
    column_of[row] = open;
    taken[open] = 1;
  }
  return column_of;
}

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

Plan renamed(const Plan& plan, const std::vector<std::size_t>& name) {
  Plan result = plan;
  for (PlanStage& stage : result.stages) {
    stage.rank = Rank{static_cast<std::int32_t>(name[stage.rank.index()])};
  }
  for (std::size_t r = 0; r < plan.order.size(); ++r) result.order[name[r]] = plan.order[r];
  return result;
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
  std::vector<std::size_t> name(cluster.ranks.size());
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
    const auto chosen = n <= kMaxExact ? best_assignment(scores) : greedy_assignment(scores);
    for (std::size_t i = 0; i < n; ++i) name[group[i]] = group[chosen[i]];
  }
  return renamed(plan, name);
}

}  // namespace dynmo::plan
