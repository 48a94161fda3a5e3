// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>

#include "dynmo/plan/assignment_impl.h"
#include "dynmo/plan/place.h"
#include "dynmo/plan/place_impl.h"
#include "dynmo/plan/traffic.h"

namespace dynmo::plan {
namespace {

constexpr int kMaxSweeps = 8;
constexpr int kMaxExchanged = 1024;  // ranks: a sweep looks at every pair of them

using Orders = std::vector<Rank>;  // rank by position

// Ranks of one kind are as fast and have as much memory.
using Kind = std::pair<double, Bytes>;
Kind kind_of(const cost::ClusterRank& rank) { return {rank.speed, rank.memory}; }

// Positions as a graph: what the messages of two positions cost more where they lie on two nodes.
class Messages {
 public:
  Messages(const Plan& plan, const BalanceProblem& problem)
      : neighbours_(static_cast<std::size_t>(plan.ranks)) {
    cost::Cluster together = problem.cluster;
    for (cost::ClusterRank& rank : together.ranks) rank.node = 0;
    cost::Cluster apart = problem.cluster;
    for (std::size_t r = 0; r < apart.ranks.size(); ++r) apart.ranks[r].node = static_cast<int>(r);
    std::map<std::pair<std::size_t, std::size_t>, double> pairs;
    for (const TrafficRow& row : traffic_of(plan, problem.model, problem.micro_batches)) {
      const double more = message_time_s({row}, apart) - message_time_s({row}, together);
      pairs[std::minmax(row.from.index(), row.to.index())] += more;
    }
    for (const auto& [pair, more] : pairs) {
      neighbours_[pair.first].emplace_back(pair.second, more);
      neighbours_[pair.second].emplace_back(pair.first, more);
    }
  }

  struct Neighbour {
    std::size_t position;
    double more_s;
    Neighbour(std::size_t where, double more) : position(where), more_s(more) {}
  };
  [[nodiscard]] const std::vector<Neighbour>& of(std::size_t position) const {
    return neighbours_[position];
  }

 private:
  std::vector<std::vector<Neighbour>> neighbours_;
};

class Orderer {
 public:
  Orderer(const Plan& plan, const BalanceProblem& problem)
      : plan_(plan),
        cluster_(problem.cluster),
        messages_(plan, problem),
        kept_(plan, problem.current, problem.model),
        aligns_(problem.current != nullptr) {}

  [[nodiscard]] Orders best() const {
    Orders given;
    for (std::int32_t r = 0; r < plan_.ranks; ++r) given.emplace_back(r);
    Orders best = given;
    for (const Orders& start : {given, blocks()}) {
      Orders order = start;
      exchange(order);
      if (aligns_) order = with_fewest_moves(order);
      if (std::pair(cost(order), moved(order)) < std::pair(cost(best), moved(best))) best = order;
    }
    return best;
  }

 private:
  [[nodiscard]] int node(Rank rank) const { return cluster_.ranks[rank.index()].node; }
  [[nodiscard]] Kind kind(std::size_t rank) const { return kind_of(cluster_.ranks[rank]); }

  [[nodiscard]] double cost(const Orders& order) const {
    double sum = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      for (const auto& [other, more] : messages_.of(i)) {
        if (other > i && node(order[i]) != node(order[other])) sum += more;
      }
    }
    return sum;
  }

  [[nodiscard]] std::int64_t moved(const Orders& order) const {
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < order.size(); ++i) bytes -= kept_.at(i, order[i].index());
    return bytes;
  }

  // Positions in the order of their first stages, idle ones behind, take the ranks of their kind
  // node by node.
  [[nodiscard]] Orders blocks() const {
    std::vector<std::size_t> positions;
    std::vector<char> seen(static_cast<std::size_t>(plan_.ranks), 0);
    const auto add = [&](std::size_t position) {
      if (!seen[position]) positions.push_back(position);
      seen[position] = 1;
    };
    for (const PlanStage& stage : plan_.stages) add(stage.rank.index());
    for (std::size_t position = 0; position < seen.size(); ++position) add(position);
    std::map<Kind, std::vector<Rank>> ranks;
    for (const Rank rank : node_by_node(cluster_)) ranks[kind(rank.index())].push_back(rank);
    std::map<Kind, std::size_t> next;
    Orders order(positions.size());
    for (const std::size_t position : positions) {
      const Kind wanted = kind(position);
      order[position] = ranks[wanted][next[wanted]++];
    }
    return order;
  }

  // How much longer the messages take with the ranks of two positions exchanged.
  [[nodiscard]] double change(const Orders& order, std::size_t a, std::size_t b) const {
    const auto one_way = [&](std::size_t position, std::size_t other) {
      double sum = 0;
      for (const auto& [neighbour, more] : messages_.of(position)) {
        if (neighbour == other) continue;
        const int there = node(order[neighbour]);
        if (node(order[other]) != there) sum += more;
        if (node(order[position]) != there) sum -= more;
      }
      return sum;
    };
    return one_way(a, b) + one_way(b, a);
  }

  void exchange(Orders& order) const {
    if (plan_.ranks > kMaxExchanged) return;
    const double least = 1e-9 * cost(order);  // what is less may be rounding
    bool helped = true;
    for (int sweep = 0; sweep < kMaxSweeps && helped; ++sweep) {
      helped = false;
      for (std::size_t a = 0; a < order.size(); ++a) {
        for (std::size_t b = a + 1; b < order.size(); ++b) {
          if (node(order[a]) == node(order[b])) continue;
          if (kind(order[a].index()) != kind(order[b].index())) continue;
          if (change(order, a, b) >= -least) continue;
          std::swap(order[a], order[b]);
          helped = true;
        }
      }
    }
  }

  // Nodes with the same kinds of ranks trade all they have, and equal ranks of a node, so that
  // most bytes stay. No message gets another link by it.
  [[nodiscard]] Orders with_fewest_moves(const Orders& order) const {
    std::map<int, std::map<Kind, std::vector<Rank>>> nodes;
    for (std::int32_t r = 0; r < plan_.ranks; ++r) {
      nodes[node(Rank{r})][kind(static_cast<std::size_t>(r))].emplace_back(r);
    }
    std::map<std::vector<std::pair<Kind, std::size_t>>, std::vector<int>> equal;
    for (const auto& [number, kinds] : nodes) {
      std::vector<std::pair<Kind, std::size_t>> sizes;
      for (const auto& [each, ranks] : kinds) sizes.emplace_back(each, ranks.size());
      equal[sizes].push_back(number);
    }
    std::map<int, int> to;  // the node that takes over a node's positions
    for (const auto& [sizes, numbers] : equal) {
      const std::vector<std::size_t> chosen = assignment(scores_of_nodes(order, numbers));
      for (std::size_t i = 0; i < numbers.size(); ++i) to[numbers[i]] = numbers[chosen[i]];
    }
    Orders result = order;
    for (const auto& [number, kinds] : nodes) {
      for (const auto& [each, ranks] : kinds) give(result, order, ranks, nodes[to[number]][each]);
    }
    return result;
  }

  [[nodiscard]] Scores scores_of_nodes(const Orders& order, const std::vector<int>& numbers) const {
    std::map<int, std::size_t> index;
    for (const int number : numbers) index.emplace(number, index.size());
    Scores scores(numbers.size(), std::vector<Score>(numbers.size(), 0));
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto row = index.find(node(order[i]));
      if (row == index.end()) continue;
      for (const auto& [rank, bytes] : kept_.of(i)) {
        const auto column = index.find(node(Rank{static_cast<std::int32_t>(rank)}));
        if (column == index.end()) continue;
        scores[row->second][column->second] += bytes;
      }
    }
    prefer_diagonal(scores);
    return scores;
  }

  // The positions that ranks `from` have in `order` go to ranks `to` of their kind on one node.
  void give(Orders& result, const Orders& order, const std::vector<Rank>& from,
            const std::vector<Rank>& to) const {
    std::vector<std::size_t> positions;
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (std::binary_search(from.begin(), from.end(), order[i])) positions.push_back(i);
    }
    Scores scores(to.size(), std::vector<Score>(to.size(), 0));
    for (std::size_t i = 0; i < positions.size(); ++i) {
      for (std::size_t j = 0; j < to.size(); ++j) {
        scores[i][j] = kept_.at(positions[i], to[j].index());
      }
    }
    prefer_diagonal(scores);
    const std::vector<std::size_t> chosen = assignment(scores);
    for (std::size_t i = 0; i < positions.size(); ++i) result[positions[i]] = to[chosen[i]];
  }

  // Prefers, of two assignments with equal scores, that which changes less.
  static void prefer_diagonal(Scores& scores) {
    for (std::size_t i = 0; i < scores.size(); ++i) {
      for (Score& score : scores[i]) score *= static_cast<Score>(scores.size() + 1);
      scores[i][i] += 1;
    }
  }

  const Plan& plan_;
  const cost::Cluster& cluster_;
  Messages messages_;
  KeptBytes kept_;
  bool aligns_;
};

}  // namespace

std::vector<Rank> order_by_messages(const Plan& plan, const BalanceProblem& problem) {
  return Orderer(plan, problem).best();
}

}  // namespace dynmo::plan
