// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/recompute.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/plan/evaluate.h"

namespace dynmo::plan {
namespace {

// A number, not a time, so that all ranks stop at the same set.
constexpr int kMaxSets = 50'000;

// A layer that is recomputed saves its input alone. Tokens belong to the batch.
Bytes input_bytes(const cost::ModelCost& model, std::size_t layer) {
  return layer == 0 ? Bytes{0} : model.layers[layer - 1].boundary_bytes;
}

// The memory that a rank's stages hold at one point of its list, in stashes of a micro-batch.
struct Point {
  std::vector<int> held;      // by stage of the rank: from F to the end of W
  std::vector<int> restored;  // from I to the end of W
  int backward = -1;          // the stage in a fused B, which restores layer by layer
  auto operator<=>(const Point&) const = default;

  [[nodiscard]] bool covers(const Point& other) const {
    return std::ranges::equal(held, other.held, std::greater_equal<>()) &&
           std::ranges::equal(restored, other.restored, std::greater_equal<>()) &&
           (other.backward < 0 || other.backward == backward);
  }
};

struct Item {
  LayerId layer;
  std::size_t stage = 0;  // of the rank
  std::int64_t activation = 0;
  std::int64_t kept = 0;  // where recomputed
  double seconds = 0;     // that recomputing adds
  [[nodiscard]] std::int64_t saved() const { return activation - kept; }
  [[nodiscard]] bool same_choice(const Item& other) const {
    return stage == other.stage && activation == other.activation && kept == other.kept &&
           seconds == other.seconds;
  }
};

// Memory of one rank as a function of the set of its layers that are recomputed.
struct RankMemory {
  std::int64_t state = 0;
  std::size_t stages = 0;
  std::vector<Item> items;  // trained layers
  std::vector<Point> points;

  [[nodiscard]] std::int64_t at(const Point& point, const std::vector<bool>& chosen) const {
    std::int64_t bytes = state;
    std::int64_t largest = 0;
    for (std::size_t i = 0; i < items.size(); ++i) {
      const Item& item = items[i];
      bytes += point.held[item.stage] * (chosen[i] ? item.kept : item.activation);
      if (!chosen[i]) continue;
      const std::int64_t saved = std::max<std::int64_t>(item.saved(), 0);
      bytes += point.restored[item.stage] * saved;
      if (static_cast<int>(item.stage) == point.backward) largest = std::max(largest, saved);
    }
    return bytes + largest;
  }
  [[nodiscard]] std::int64_t peak(const std::vector<bool>& chosen) const {
    std::int64_t peak = state;
    for (const Point& point : points) peak = std::max(peak, at(point, chosen));
    return peak;
  }
};

std::vector<Point> points_of(const std::vector<schedule::Action>& list,
                             const std::vector<int>& local, const std::vector<bool>& frozen,
                             std::size_t stages) {
  using schedule::ActionKind;
  std::vector<Point> points;
  Point now{.held = std::vector<int>(stages), .restored = std::vector<int>(stages)};
  for (const schedule::Action& action : list) {
    const std::size_t global = action.stage.index();
    if (frozen[global]) continue;
    const auto stage = static_cast<std::size_t>(local[global]);
    switch (action.kind) {
      case ActionKind::kForward:
        ++now.held[stage];
        points.push_back(now);
        break;
      case ActionKind::kInputGradient:
        ++now.restored[stage];
        points.push_back(now);
        break;
      case ActionKind::kWeightGradient:
        --now.restored[stage];
        --now.held[stage];
        break;
      default:
        now.backward = static_cast<int>(stage);
        points.push_back(now);
        now.backward = -1;
        --now.held[stage];
    }
  }
  std::sort(points.begin(), points.end(), std::greater<>());
  points.erase(std::unique(points.begin(), points.end()), points.end());
  std::vector<Point> largest;
  for (const Point& point : points) {
    const bool covered = std::any_of(largest.begin(), largest.end(),
                                     [&](const Point& other) { return other.covers(point); });
    if (!covered) largest.push_back(point);
  }
  return largest;
}

Expected<std::vector<RankMemory>> memory_of(const Plan& plan, const cost::ModelCost& model,
                                            int micro_batches) {
  DYNMO_TRY(cost::validate(model, micro_batches));
  DYNMO_TRY(validate(plan, model.size()));
  const int prefix = model.frozen_layers();
  DYNMO_ASSIGN(const schedule::Schedule schedule, schedule_of(plan, micro_batches, prefix));
  std::vector<RankMemory> ranks(static_cast<std::size_t>(plan.ranks));
  std::vector<int> local;
  std::vector<bool> frozen;
  for (std::size_t s = 0; s < plan.stages.size(); ++s) {
    const PlanStage& stage = plan.stages[s];
    RankMemory& rank = ranks[stage.rank.index()];
    local.push_back(static_cast<int>(rank.stages));
    frozen.push_back(schedule.shape.stages[s].frozen);
    for (auto i = static_cast<std::size_t>(stage.layers.first.value);
         i < static_cast<std::size_t>(stage.layers.end()); ++i) {
      const cost::LayerCost& layer = model.layers[i];
      rank.state += cost::state_bytes(layer).value;
      if (static_cast<int>(i) < prefix) continue;
      rank.items.push_back({.layer = LayerId(static_cast<std::int32_t>(i)),
                            .stage = rank.stages,
                            .activation = layer.activation_bytes.value,
                            .kept = input_bytes(model, i).value,
                            .seconds = layer.forward_s});
    }
    ++rank.stages;
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    ranks[r].points = points_of(schedule.ranks[r], local, frozen, ranks[r].stages);
  }
  return ranks;
}

// The least sum of seconds over sets that fit `limit`. Requires that recomputing all fits:
// recomputing one layer more never takes more memory.
class MinTime {
 public:
  MinTime(const RankMemory& rank, std::int64_t limit) : rank_(rank), limit_(limit) {
    for (std::size_t i = 0; i < rank.items.size(); ++i) {
      if (rank.items[i].saved() > 0) order_.push_back(i);
    }
    const auto key = [&](std::size_t i) {
      const Item& item = rank.items[i];
      return std::tuple(item.seconds / static_cast<double>(item.saved()), item.stage, -item.saved(),
                        i);
    };
    std::sort(order_.begin(), order_.end(),
              [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
    chosen_.assign(rank.items.size(), false);
  }

  std::vector<bool> find() {
    greedy();
    chosen_.assign(rank_.items.size(), false);
    extend(0, 0);
    return best_;
  }

 private:
  // Adds layers by seconds saved a byte until the rest fits; then removes those that were not
  // needed, the slowest first.
  void greedy() {
    for (const std::size_t i : order_) {
      if (rank_.peak(chosen_) <= limit_) break;
      chosen_[i] = true;
    }
    std::vector<std::size_t> slowest = order_;
    std::stable_sort(slowest.begin(), slowest.end(), [&](std::size_t a, std::size_t b) {
      return rank_.items[a].seconds > rank_.items[b].seconds;
    });
    for (const std::size_t i : slowest) {
      if (!chosen_[i]) continue;
      chosen_[i] = false;
      if (rank_.peak(chosen_) > limit_) chosen_[i] = true;
    }
    best_ = chosen_;
    best_seconds_ = 0;
    for (const std::size_t i : order_) best_seconds_ += chosen_[i] ? rank_.items[i].seconds : 0;
  }

  // The layers from order_[next] on add at least these seconds.
  [[nodiscard]] double bound(std::size_t next) const {
    double max_s = 0;
    for (const Point& point : rank_.points) {
      const std::int64_t excess = rank_.at(point, chosen_) - limit_;
      if (excess <= 0) continue;
      double cheapest = std::numeric_limits<double>::infinity();  // seconds a byte
      double reach = 0;
      for (std::size_t k = next; k < order_.size(); ++k) {
        const Item& item = rank_.items[order_[k]];
        const auto gain = static_cast<double>(point.held[item.stage] * item.saved());
        if (gain <= 0) continue;
        cheapest = std::min(cheapest, item.seconds / gain);
        reach += gain;
      }
      if (reach < static_cast<double>(excess)) return std::numeric_limits<double>::infinity();
      max_s = std::max(max_s, cheapest * static_cast<double>(excess));
    }
    return max_s;
  }

  void extend(std::size_t next, double seconds) {
    if (++nodes_ > kMaxSets) return;
    if (rank_.peak(chosen_) <= limit_) {
      if (seconds < best_seconds_) {
        best_seconds_ = seconds;
        best_ = chosen_;
      }
      return;
    }
    // A little below, so that rounding does not cut off the best.
    if (next == order_.size() || seconds + bound(next) * (1 - 1e-12) >= best_seconds_) return;
    const std::size_t i = order_[next];
    chosen_[i] = true;
    extend(next + 1, seconds + rank_.items[i].seconds);
    chosen_[i] = false;
    // Among layers that are alike, the first ones are taken.
    std::size_t other = next + 1;
    while (other < order_.size() && rank_.items[order_[other]].same_choice(rank_.items[i])) ++other;
    extend(other, seconds);
  }

  const RankMemory& rank_;
  std::int64_t limit_;
  std::vector<std::size_t> order_;  // of items that save anything, by seconds a byte
  std::vector<bool> chosen_;
  std::vector<bool> best_;
  double best_seconds_ = 0;
  int nodes_ = 0;
};

LayerSet whole(const cost::ModelCost& model) {
  LayerSet layers;
  for (std::int32_t i = std::max(1, model.frozen_layers()); i < model.size(); ++i) {
    layers.emplace_back(i);
  }
  return layers;
}

}  // namespace

Expected<Recompute> parse_recompute(std::string_view name) {
  if (name == "none") return Recompute::kNone;
  if (name == "whole") return Recompute::kWhole;
  if (name == "auto") return Recompute::kAuto;
  return make_error(ErrorCode::kBadInput, "'{}' is no choice, wanted none, whole or auto", name);
}

cost::ModelCost recomputed(cost::ModelCost model, const LayerSet& layers) {
  const int prefix = model.frozen_layers();
  for (const LayerId id : layers) {
    DYNMO_CHECK(id.value >= 0 && id.value < model.size(), "a layer below {}, got {}", model.size(),
                id);
    if (id.value < prefix) continue;
    cost::LayerCost& layer = model.layers[id.index()];
    layer.backward_input_s += layer.forward_s;
    layer.activation_bytes = input_bytes(model, id.index());
  }
  return model;
}

Expected<std::vector<Bytes>> peak_memory(const Plan& plan, const cost::ModelCost& model,
                                         int micro_batches, const LayerSet& layers) {
  DYNMO_ASSIGN(const auto ranks, memory_of(plan, model, micro_batches));
  std::vector<Bytes> peaks;
  for (const RankMemory& rank : ranks) {
    std::vector<bool> chosen;
    for (const Item& item : rank.items) {
      chosen.push_back(std::binary_search(layers.begin(), layers.end(), item.layer));
    }
    peaks.emplace_back(rank.peak(chosen));
  }
  return peaks;
}

Expected<Evaluation> evaluate_recomputed(const Plan& plan, const cost::ModelCost& model,
                                         const cost::Cluster& cluster, int micro_batches,
                                         const LayerSet& layers, sim::SimOptions options) {
  DYNMO_ASSIGN(Evaluation evaluation,
               evaluate(plan, recomputed(model, layers), cluster, micro_batches, options));
  if (layers.empty()) return evaluation;
  DYNMO_ASSIGN(const std::vector<Bytes> peaks, peak_memory(plan, model, micro_batches, layers));
  for (std::size_t r = 0; r < peaks.size(); ++r) {
    sim::RankUsage& rank = evaluation.result.ranks[r];
    rank.peak_activation += peaks[r] - rank.peak_memory;
    rank.peak_memory = peaks[r];
  }
  return evaluation;
}

Expected<LayerSet> recomputed_layers(Recompute choice, const Plan& plan,
                                     const cost::ModelCost& model, const cost::Cluster& cluster,
                                     int micro_batches) {
  if (choice == Recompute::kNone) return LayerSet();
  if (choice == Recompute::kWhole) return whole(model);
  DYNMO_ASSIGN(const auto ranks, memory_of(plan, model, micro_batches));
  if (plan.ranks != cluster.size()) {
    return make_error(ErrorCode::kBadInput,
                      "the plan is for {} ranks, the cluster has {}: make a plan for this cluster",
                      plan.ranks, cluster.size());
  }
  LayerSet layers;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const RankMemory& rank = ranks[r];
    const Bytes has = cluster.ranks[r].memory;
    std::vector<bool> all;
    for (const Item& item : rank.items) all.push_back(item.saved() > 0);
    const Bytes minimum{rank.peak(all)};
    if (minimum > has) {
      return make_error(ErrorCode::kInfeasible,
                        "plan {} takes {} bytes ({}) on rank {} with every layer recomputed, which "
                        "has {} bytes ({}): give it that much, or use more ranks or smaller "
                        "micro-batches",
                        to_string(plan), minimum.value, format_bytes(minimum), r, has.value,
                        format_bytes(has));
    }
    const std::vector<bool> chosen = MinTime(rank, has.value).find();
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      if (chosen[i]) layers.push_back(rank.items[i].layer);
    }
  }
  std::sort(layers.begin(), layers.end());
  return layers;
}

Expected<RecomputeProposal> propose(Balancer balancer, const BalanceProblem& problem,
                                    const ProposeOptions& options, Recompute choice) {
  if (choice != Recompute::kWhole) {
    auto without = propose(balancer, problem, options);
    const bool retry =
        choice == Recompute::kAuto && !without && without.error().code == ErrorCode::kInfeasible;
    if (!retry) {
      if (!without) return without.error();
      return RecomputeProposal{.proposal = *std::move(without), .layers = {}};
    }
  }
  const cost::ModelCost all = recomputed(problem.model, whole(problem.model));
  BalanceProblem smaller{all, problem.cluster, problem.micro_batches, problem.schedule};
  smaller.stages_per_rank = problem.stages_per_rank;
  smaller.current = problem.current;
  DYNMO_ASSIGN(Proposal proposal, propose(balancer, smaller, options));
  RecomputeProposal result{.proposal = std::move(proposal), .layers = {}};
  DYNMO_ASSIGN(result.layers, recomputed_layers(choice, result.proposal.plan, problem.model,
                                                problem.cluster, problem.micro_batches));
  DYNMO_ASSIGN(result.proposal.evaluation,
               evaluate_recomputed(result.proposal.plan, problem.model, problem.cluster,
                                   problem.micro_batches, result.layers));
  DYNMO_TRY(require_memory(result.proposal.plan, result.proposal.evaluation, problem.cluster,
                           result.proposal.winner));
  return result;
}

}  // namespace dynmo::plan
