// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/plan/assignment_impl.h"
#include "dynmo/plan/place.h"
#include "dynmo/plan/place_impl.h"
#include "dynmo/plan/traffic.h"

namespace dynmo::plan {
namespace {

constexpr int kMaxSweeps = 8;
constexpr int kMaxExchanged = 1024;  // ranks: a sweep looks at every pair of them

using Orders = std::vector<Rank>;  // rank by position

// The speed and memory of a rank.
using Kind = std::pair<double, Bytes>;
Kind kind_of(const cost::ClusterRank& rank) { return {rank.speed, rank.memory}; }

// The number of distances of two ranks: on one node, on two nodes of a switch, on two switches.
constexpr std::size_t kDistances = 3;
using Times = std::array<double, kDistances>;  // seconds, by distance

// The seconds that all messages between two positions take at each distance.
class Messages {
 public:
  Messages(const Plan& plan, const BalanceProblem& problem)
      : neighbours_(static_cast<std::size_t>(plan.ranks)) {
    std::array<cost::Cluster, kDistances> apart;
    for (std::size_t distance = 0; distance < kDistances; ++distance) {
      apart[distance] = problem.cluster;
      for (std::size_t r = 0; r < problem.cluster.ranks.size(); ++r) {
        cost::ClusterRank& rank = apart[distance].ranks[r];
        rank.node = distance == 0 ? 0 : static_cast<int>(r);
        rank.network_switch = distance < 2 ? 0 : static_cast<int>(r);
      }
    }
    std::map<std::pair<std::size_t, std::size_t>, Times> pairs;
    for (const TrafficRow& row : traffic_of(plan, problem.model, problem.micro_batches)) {
      Times& times = pairs[std::minmax(row.from.index(), row.to.index())];
      for (std::size_t distance = 0; distance < kDistances; ++distance) {
        times[distance] += message_time_s({row}, apart[distance]);
      }
    }
    for (const auto& [pair, times] : pairs) {
      neighbours_[pair.first].emplace_back(pair.second, times);
      neighbours_[pair.second].emplace_back(pair.first, times);
    }
  }

  struct Neighbour {
    std::size_t position;
    Times times_s;
    Neighbour(std::size_t where, const Times& times) : position(where), times_s(times) {}
  };
  [[nodiscard]] const std::vector<Neighbour>& of(std::size_t position) const {
    return neighbours_[position];
  }

 private:
  std::vector<std::vector<Neighbour>> neighbours_;
};

// Prefers, of two assignments with equal scores, that which changes less.
void prefer_diagonal(Scores& scores) {
  for (std::size_t i = 0; i < scores.size(); ++i) {
    for (Score& score : scores[i]) score *= static_cast<Score>(scores.size() + 1);
    scores[i][i] += 1;
  }
}

// Gives each position one of the ranks, whose number is equal, so that most bytes stay.
void assign(Orders& order, const KeptBytes& kept, const std::vector<std::size_t>& positions,
            const std::vector<Rank>& ranks) {
  Scores scores(ranks.size(), std::vector<Score>(ranks.size(), 0));
  for (std::size_t i = 0; i < positions.size(); ++i) {
    for (std::size_t j = 0; j < ranks.size(); ++j) {
      scores[i][j] = kept.at(positions[i], ranks[j].index());
    }
  }
  prefer_diagonal(scores);
  const std::vector<std::size_t> chosen = assignment(scores);
  for (std::size_t i = 0; i < positions.size(); ++i) order[positions[i]] = ranks[chosen[i]];
}

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
  [[nodiscard]] int switch_of(Rank rank) const {
    return cluster_.ranks[rank.index()].network_switch;
  }
  [[nodiscard]] Kind kind(std::size_t rank) const { return kind_of(cluster_.ranks[rank]); }

  [[nodiscard]] std::size_t distance(Rank a, Rank b) const {
    if (node(a) == node(b)) return 0;
    const bool is_far = cluster_.between_switches && switch_of(a) != switch_of(b);
    return is_far ? 2 : 1;
  }

  [[nodiscard]] double cost(const Orders& order) const {
    double sum = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      for (const auto& [other, times] : messages_.of(i)) {
        if (other > i) sum += times[distance(order[i], order[other])];
      }
    }
    return sum;
  }

  [[nodiscard]] std::int64_t moved(const Orders& order) const {
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < order.size(); ++i) bytes -= kept_.at(i, order[i].index());
    return bytes;
  }

  // Returns an order in which positions take ranks of their kind node by node. Positions go by
  // their first stages, and those without a stage come last.
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

  // Returns the seconds by which messages take longer if two positions exchange their ranks.
  [[nodiscard]] double change(const Orders& order, std::size_t a, std::size_t b) const {
    const auto one_way = [&](std::size_t position, std::size_t other) {
      double sum = 0;
      for (const auto& [neighbour, times] : messages_.of(position)) {
        if (neighbour == other) continue;
        sum += times[distance(order[other], order[neighbour])] -
               times[distance(order[position], order[neighbour])];
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

  // Exchanges equal nodes of a switch, and equal ranks of a node, so that most bytes stay. No
  // message gets another link by it.
  [[nodiscard]] Orders with_fewest_moves(const Orders& order) const {
    std::map<int, std::map<Kind, std::vector<Rank>>> nodes;
    for (std::int32_t r = 0; r < plan_.ranks; ++r) {
      nodes[node(Rank{r})][kind(static_cast<std::size_t>(r))].emplace_back(r);
    }
    std::map<std::pair<int, std::vector<std::pair<Kind, std::size_t>>>, std::vector<int>> equal;
    for (const auto& [number, kinds] : nodes) {
      std::vector<std::pair<Kind, std::size_t>> sizes;
      for (const auto& [each, ranks] : kinds) sizes.emplace_back(each, ranks.size());
      const Rank any = kinds.begin()->second.front();
      equal[{cluster_.between_switches ? switch_of(any) : 0, sizes}].push_back(number);
    }
    std::map<int, int> to;  // the node that takes over a node's positions
    for (const auto& [alike, numbers] : equal) {
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

  // Gives the positions of ranks `from` to ranks `to`, which are of equal number and kind on
  // one node.
  void give(Orders& result, const Orders& order, const std::vector<Rank>& from,
            const std::vector<Rank>& to) const {
    std::vector<std::size_t> positions;
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (std::binary_search(from.begin(), from.end(), order[i])) positions.push_back(i);
    }
    assign(result, kept_, positions, to);
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

Plan align(const Plan& plan, const Plan& from, const cost::Cluster& cluster,
           const cost::ModelCost& model) {
  DYNMO_CHECK(plan.ranks == cluster.size() && from.ranks == cluster.size(),
              "two plans for {} ranks, got {} and {}", cluster.size(), plan.ranks, from.ranks);
  std::map<std::pair<Kind, int>, std::vector<std::size_t>> equal;
  for (std::size_t r = 0; r < cluster.ranks.size(); ++r) {
    equal[{kind_of(cluster.ranks[r]), cluster.ranks[r].node}].push_back(r);
  }
  const KeptBytes kept(plan, &from, model);
  Orders names(cluster.ranks.size());
  for (const auto& [kind, positions] : equal) {
    std::vector<Rank> ranks;
    for (const std::size_t r : positions) ranks.emplace_back(static_cast<std::int32_t>(r));
    assign(names, kept, positions, ranks);
  }
  return renamed(plan, names);
}

}  // namespace dynmo::plan
