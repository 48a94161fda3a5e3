// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <tuple>

#include "dynmo/plan/assignment_impl.h"

namespace dynmo::plan {
namespace {

constexpr std::size_t kMaxExact = 512;

// Returns the column of each row, such that the sum of the scores is greatest. This is the
// Hungarian method by shortest augmenting paths (Jonker and Volgenant 1987), on costs = -score. Row
// and column 0 of its arrays are sentinels.
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

}  // namespace

std::vector<std::size_t> assignment(const Scores& scores) {
  return scores.size() <= kMaxExact ? best_assignment(scores) : greedy_assignment(scores);
}

}  // namespace dynmo::plan
