// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/place.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/place_impl.h"
#include "dynmo/plan/traffic.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::plan {
namespace {

// Returns the seconds that a message between two ranks takes.
double transfer_s(const cost::Cluster& cluster, Rank from, Rank to, Bytes bytes) {
  const cost::Link& link = cluster.link(from, to);
  const bool crosses = cluster.ranks[from.index()].node != cluster.ranks[to.index()].node;
  const double bandwidth =
      crosses ? std::min(link.bandwidth_bytes_per_s, cluster.nic_bandwidth_bytes_per_s)
              : link.bandwidth_bytes_per_s;
  return link.latency_s + static_cast<double>(bytes.value) / bandwidth;
}

bool nodes_matter(const cost::Cluster& cluster) {
  return cluster.inside_node != cluster.between_nodes || cluster.between_switches ||
         std::isfinite(cluster.nic_bandwidth_bytes_per_s);
}

cost::Cluster reordered(const cost::Cluster& cluster, const std::vector<Rank>& order) {
  cost::Cluster other = cluster;
  for (std::size_t i = 0; i < order.size(); ++i) other.ranks[i] = cluster.ranks[order[i].index()];
  return other;
}

// An order of the ranks: position i gets rank ranks[i].
struct Order {
  std::vector<Rank> ranks;
  std::int64_t moved = 0;  // bytes
  double bound_s = 0;
};

// Computes a lower bound of the time of a replay. A stage waits until the first micro-batch has
// passed all stages before it, and a rank does all its work. After the last input gradient of a
// stage, one must pass down to the first stage that trains.
class Bound {
 public:
  Bound(const schedule::PipelineShape& shape, const std::vector<sim::StageCost>& costs)
      : shape_(shape), costs_(costs), work_(static_cast<std::size_t>(shape.ranks)) {}

  [[nodiscard]] double seconds(const cost::Cluster& cluster) {
    std::fill(work_.begin(), work_.end(), Work{});
    const double micro_batches = shape_.micro_batches;
    double head = 0;
    double tail = 0;
    double bound = 0;
    double update = 0;
    for (std::size_t s = 0; s < costs_.size(); ++s) {
      const auto [rank, frozen] = shape_.stages[s];
      const double speed = cluster.ranks[rank.index()].speed;
      const auto time = [&](Nanoseconds cost) { return to_seconds(cost) / speed; };
      const sim::StageCost& cost = costs_[s];
      const double input = frozen ? 0 : time(cost.input_gradient);
      if (s > 0) head += message(cluster, s - 1, /*gradient=*/false);
      if (s > 0 && !shape_.stages[s - 1].frozen) tail += message(cluster, s - 1, true);
      Work& work = work_[rank.index()];
      work.start = std::min(work.start, head);
      work.passing += micro_batches * (time(cost.forward) + input);
      work.later += frozen ? 0 : micro_batches * time(cost.weight_gradient);
      work.update += frozen ? 0 : time(cost.update);
      work.tail = frozen ? 0 : std::min(work.tail, tail);
      head += time(cost.forward);
      bound = std::max(bound, head + (frozen ? 0 : input + tail));
      tail += input;
    }
    for (const Work& work : work_) {
      if (work.start == kNever) continue;
      bound = std::max(
          {bound, work.start + work.passing + work.later, work.start + work.passing + work.tail});
      update = std::max(update, work.update);
    }
    // A replay rounds each time to a nanosecond.
    const double rounding = 1e-9 * (4 + 3 * micro_batches * static_cast<double>(costs_.size()));
    return (bound + update) * (1 - 1e-9) - rounding;
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  struct Work {
    double start = kNever;
    double passing = 0;  // F and I
    double later = 0;    // W
    double update = 0;
    double tail = kNever;
  };

  [[nodiscard]] double message(const cost::Cluster& cluster, std::size_t boundary,
                               bool gradient) const {
    const Rank low = shape_.stages[boundary].rank;
    const Rank high = shape_.stages[boundary + 1].rank;
    if (low == high) return 0;
    return transfer_s(cluster, gradient ? high : low, gradient ? low : high,
                      costs_[boundary].boundary);
  }

  const schedule::PipelineShape& shape_;
  const std::vector<sim::StageCost>& costs_;
  std::vector<Work> work_;
};

// Returns all orders that can differ in step time, the given one first. Among orders with equal
// step time it returns the one that moves the fewest bytes. Two orders have the same step where
// each position has the same speed and memory and the same positions share a node and a switch.
std::vector<Order> different_orders(const cost::Cluster& cluster, const KeptBytes& kept) {
  const auto ranks = cluster.ranks.size();
  std::vector<std::uint64_t> kind;  // of a rank: the first that is as fast and has as much memory
  for (const cost::ClusterRank& rank : cluster.ranks) {
    std::uint64_t first = 0;
    while (cluster.ranks[first].speed != rank.speed || cluster.ranks[first].memory != rank.memory) {
      ++first;
    }
    kind.push_back(first);
  }
  const bool nodes = nodes_matter(cluster);
  std::vector<Order> orders;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::size_t> known;
  std::vector<Rank> order;
  for (std::size_t r = 0; r < ranks; ++r) order.emplace_back(static_cast<std::int32_t>(r));
  do {
    std::uint64_t key = 0;
    std::uint64_t switches = 0;
    std::int64_t moved = 0;
    for (std::size_t i = 0; i < ranks; ++i) {
      const std::size_t rank = order[i].index();
      std::uint64_t together = 0;  // the first position on this node
      while (nodes && cluster.ranks[order[together].index()].node != cluster.ranks[rank].node) {
        ++together;
      }
      key = key * 64 + kind[rank] * 8 + together;
      together = 0;
      while (cluster.between_switches && cluster.ranks[order[together].index()].network_switch !=
                                             cluster.ranks[rank].network_switch) {
        ++together;
      }
      switches = switches * 8 + together;
      moved -= kept.at(i, rank);
    }
    const auto [found, is_new] = known.try_emplace({key, switches}, orders.size());
    if (is_new) {
      orders.push_back({order, moved});
    } else if (moved < orders[found->second].moved) {
      orders[found->second] = {order, moved};
    }
  } while (std::next_permutation(order.begin(), order.end()));
  return orders;
}

Expected<sim::CheckedSchedule> checked_schedule(const Plan& plan, const BalanceProblem& problem) {
  DYNMO_ASSIGN(const schedule::Schedule compute,
               schedule_of(plan, problem.micro_batches, problem.model.frozen_layers()));
  return sim::CheckedSchedule::make(schedule::lower(compute));
}

Expected<std::vector<Rank>> best_order(const Plan& plan, const BalanceProblem& problem,
                                       std::int64_t max_replays) {
  const schedule::PipelineShape shape =
      shape_of(plan, problem.micro_batches, problem.model.frozen_layers());
  DYNMO_ASSIGN(const sim::CheckedSchedule checked, checked_schedule(plan, problem));
  const std::vector<sim::StageCost> costs = stage_costs(plan, problem.model, problem.cluster);
  std::vector<Order> orders =
      different_orders(problem.cluster, KeptBytes(plan, problem.current, problem.model));
  Bound bound(shape, costs);
  for (Order& order : orders)
    order.bound_s = bound.seconds(reordered(problem.cluster, order.ranks));
  // The given order stays first, whatever its bound, because the result must not be worse.
  std::stable_sort(orders.begin() + 1, orders.end(),
                   [](const Order& a, const Order& b) { return a.bound_s < b.bound_s; });
  const Order* best = nullptr;
  Nanoseconds step{0};
  for (const Order& order : orders) {
    if (best != nullptr && order.bound_s > to_seconds(step)) {
      if (&order == &orders.front()) continue;
      break;
    }
    if (max_replays-- <= 0) break;
    const cost::Cluster cluster = reordered(problem.cluster, order.ranks);
    DYNMO_ASSIGN(const sim::SimResult result, sim::simulate(checked, costs, cluster));
    if (!fits_memory(result, cluster)) continue;
    const bool better = best == nullptr || result.step_time < step ||
                        (result.step_time == step && order.moved < best->moved);
    if (!better) continue;
    best = &order;
    step = result.step_time;
  }
  return best != nullptr ? best->ranks : orders.front().ranks;
}

}  // namespace

KeptBytes::KeptBytes(const Plan& plan, const Plan* current, const cost::ModelCost& model)
    : rows_(static_cast<std::size_t>(plan.ranks)) {
  if (current == nullptr) return;
  const std::vector<Rank> then = owners(plan);
  const std::vector<Rank> now = owners(*current);
  for (std::size_t layer = 0; layer < then.size(); ++layer) {
    rows_[then[layer].index()][now[layer].index()] += moved_bytes(model.layers[layer]).value;
  }
}

std::int64_t KeptBytes::at(std::size_t position, std::size_t rank) const {
  const auto found = rows_[position].find(rank);
  return found == rows_[position].end() ? 0 : found->second;
}

bool place_matters(const cost::Cluster& cluster) {
  const bool nodes = nodes_matter(cluster);
  const cost::ClusterRank& first = cluster.ranks.front();
  return std::any_of(cluster.ranks.begin(), cluster.ranks.end(), [&](const auto& rank) {
    return rank.speed != first.speed || rank.memory != first.memory ||
           (nodes && rank.node != first.node);
  });
}

double message_time_s(const TrafficRows& rows, const cost::Cluster& cluster) {
  double sum = 0;
  for (const TrafficRow& row : rows) {
    const Rank from(row.from.value);
    const Rank to(row.to.value);
    // Counts the latency of every message, and the time of all their bytes.
    sum += static_cast<double>(row.count.messages) * transfer_s(cluster, from, to, Bytes{0}) +
           transfer_s(cluster, from, to, row.count.bytes) - transfer_s(cluster, from, to, Bytes{0});
  }
  return sum;
}

std::vector<Rank> node_by_node(const cost::Cluster& cluster) {
  std::map<int, std::size_t> place;  // of a node, by its first rank
  std::map<int, std::size_t> place_of_switch;
  for (const cost::ClusterRank& rank : cluster.ranks) {
    place.try_emplace(rank.node, place.size());
    place_of_switch.try_emplace(cluster.between_switches ? rank.network_switch : 0,
                                place_of_switch.size());
  }
  const auto where = [&](Rank rank) {
    const cost::ClusterRank& of = cluster.ranks[rank.index()];
    return std::pair(place_of_switch[cluster.between_switches ? of.network_switch : 0],
                     place[of.node]);
  };
  std::vector<Rank> order;
  for (std::int32_t r = 0; r < cluster.size(); ++r) order.emplace_back(r);
  std::stable_sort(order.begin(), order.end(), [&](Rank a, Rank b) { return where(a) < where(b); });
  return order;
}

Expected<Plan> place(const Plan& plan, const BalanceProblem& problem, std::int64_t max_replays) {
  DYNMO_TRY(validate(plan, problem.model.size()));
  DYNMO_CHECK(plan.ranks == problem.cluster.size(), "a plan of {} ranks, got {}",
              problem.cluster.size(), plan.ranks);
  if (plan.ranks <= kMaxOrdered) {
    DYNMO_ASSIGN(const std::vector<Rank> order, best_order(plan, problem, max_replays));
    return renamed(plan, order);
  }
  const std::vector<Rank> order = order_by_messages(plan, problem);
  Plan placed = renamed(plan, order);
  if (placed == plan) return plan;
  // Renaming ranks in a plan equals exchanging ranks of the cluster under the same schedule. So the
  // schedule is made and checked once, which takes longer than a replay.
  DYNMO_ASSIGN(const sim::CheckedSchedule checked, checked_schedule(plan, problem));
  const std::vector<sim::StageCost> costs = stage_costs(plan, problem.model, problem.cluster);
  const cost::Cluster exchanged = reordered(problem.cluster, order);
  DYNMO_ASSIGN(const sim::SimResult given, sim::simulate(checked, costs, problem.cluster));
  DYNMO_ASSIGN(const sim::SimResult other, sim::simulate(checked, costs, exchanged));
  const bool fits = fits_memory(other, exchanged) || !fits_memory(given, problem.cluster);
  return fits && other.step_time <= given.step_time ? placed : plan;
}

}  // namespace dynmo::plan
