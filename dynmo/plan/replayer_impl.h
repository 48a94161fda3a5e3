// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replays many cuts of one problem and one placement. A schedule depends only on the number of
// frozen stages, so each is made, checked and ordered once.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/chain_impl.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/plan.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/simulate.h"
#include "dynmo/sim/step_timer.h"

namespace dynmo::plan {

class Replayer {
 public:
  // Begins without schedules. If `recomputing` is given, its memory applies instead of the
  // replay's. Keeps the references.
  Replayer(const Costs& costs, schedule::ScheduleKind kind,
           const internal::Chain* recomputing = nullptr)
      : costs_(costs),
        kind_(kind),
        recomputing_(recomputing),
        placement_(schedule::loop_placement(costs.cluster.size(), 1)),
        orders_(placement_.size() + 1) {}

  // Begins for stages on the ranks of `placement`, without recomputation.
  Replayer(const Costs& costs, schedule::ScheduleKind kind, std::vector<Rank> placement)
      : costs_(costs),
        kind_(kind),
        recomputing_(nullptr),
        placement_(std::move(placement)),
        orders_(placement_.size() + 1) {}

  // Returns the step time, or nullopt if the memory does not suffice. Returns the errors of the
  // schedule and the replay.
  Expected<std::optional<Nanoseconds>> step_time(const std::vector<int>& counts) {
    const Plan plan = make_plan(counts, placement_, costs_.cluster.size(), kind_);
    std::vector<sim::StageCost> costs = stage_costs(plan, costs_.model, costs_.cluster);
    if (recomputing_ != nullptr && !add_recomputation(plan, costs)) {
      return std::optional<Nanoseconds>();
    }
    const auto shape = shape_of(plan, costs_.micro_batches, costs_.model.frozen_layers());
    const auto frozen = static_cast<std::size_t>(
        std::count_if(shape.stages.begin(), shape.stages.end(),
                      [](const schedule::StageShape& stage) { return stage.frozen; }));
    std::optional<Order>& order = orders_[frozen];
    if (!order) {
      DYNMO_ASSIGN(order, order_of(shape));
    }
    if (recomputing_ == nullptr && !fits(costs, order->in_flight)) {
      if (std::ssize(placement_) == costs_.cluster.size()) return std::optional<Nanoseconds>();
      DYNMO_ASSIGN(const Evaluation exact, evaluate(plan, costs_));
      if (!fits_memory(exact.result, costs_.cluster)) return std::optional<Nanoseconds>();
    }
    ++replays_;
    actions_ += order->actions;
    DYNMO_ASSIGN(const Nanoseconds time, order->timer.step_time(costs, costs_.cluster));
    return std::optional(time);
  }

  [[nodiscard]] std::int64_t replays() const { return replays_; }
  [[nodiscard]] std::int64_t actions() const { return actions_; }  // of all replays

 private:
  struct Order {
    sim::StepTimer timer;
    std::vector<int> in_flight;  // by stage
    std::int64_t actions = 0;
  };

  [[nodiscard]] Expected<Order> order_of(const schedule::PipelineShape& shape) const {
    DYNMO_ASSIGN(const auto compute, schedule::make_schedule(kind_, shape));
    DYNMO_ASSIGN(auto timer, sim::StepTimer::make(schedule::lower(compute)));
    std::int64_t actions = 0;
    for (const auto& rank : timer.schedule().ranks) actions += std::ssize(rank);
    return Order{std::move(timer), schedule::in_flight(compute), actions};
  }

  // Returns whether the sum of the state and the most stashes fits on every rank. The sum is the
  // replay's peak if each rank has one stage, else a bound on the peak.
  [[nodiscard]] bool fits(const std::vector<sim::StageCost>& costs,
                          const std::vector<int>& in_flight) const {
    std::vector<Bytes> peaks(costs_.cluster.ranks.size());
    for (std::size_t s = 0; s < costs.size(); ++s) {
      peaks[placement_[s].index()] += costs[s].state + costs[s].activation * in_flight[s];
    }
    return std::ranges::equal(peaks, costs_.cluster.ranks, std::ranges::less_equal(), {},
                              &cost::ClusterRank::memory);
  }

  // Adds recomputation to the costs. Returns false if a stage does not fit.
  [[nodiscard]] bool add_recomputation(const Plan& plan, std::vector<sim::StageCost>& costs) const {
    for (std::size_t s = 0; s < costs.size(); ++s) {
      const LayerRange& layers = plan.stages[s].layers;
      const auto added = recomputing_->added_s(static_cast<int>(plan.stages[s].rank.index()),
                                               layers.first.value, layers.end());
      if (!added) return false;
      costs[s].input_gradient += to_nanoseconds(*added);
    }
    return true;
  }

  Costs costs_;
  schedule::ScheduleKind kind_;
  const internal::Chain* recomputing_;
  std::vector<Rank> placement_;               // by stage
  std::vector<std::optional<Order>> orders_;  // by frozen stages
  std::int64_t replays_ = 0;
  std::int64_t actions_ = 0;
};

// A move of one layer from one stage to another. Those between pass on one layer each.
struct CutMove {
  std::size_t from = 0;
  std::size_t to = 0;

  // Returns the layers of each stage after the move.
  [[nodiscard]] std::vector<int> of(std::vector<int> counts) const {
    --counts[from];
    ++counts[to];
    return counts;
  }
};

template <typename Bound>
struct BoundedMove {
  CutMove move;
  Bound bound{0};  // lower bound of the step time
};

// Returns the moves after which the bound is less than `below`, the least bound first. A stage
// keeps one layer. If there are more than 128 stages, only near ones exchange a layer, so that the
// time grows with the square of their number: bound_of() looks at all stages.
template <typename Bound, typename BoundOf>
std::vector<BoundedMove<Bound>> moves_below(Bound below, std::vector<int> counts,
                                            const BoundOf& bound_of) {
  constexpr std::size_t kMostStages = 5'000'000;  // looked at
  const std::size_t stages = counts.size();
  const std::size_t reach = std::max<std::size_t>(1, kMostStages / (2 * stages * stages));
  std::vector<BoundedMove<Bound>> found;
  for (std::size_t from = 0; from < stages; ++from) {
    if (counts[from] == 1) continue;
    --counts[from];
    const std::size_t end = std::min(stages, from + reach + 1);
    for (std::size_t to = from - std::min(from, reach); to < end; ++to) {
      if (to == from) continue;
      ++counts[to];
      const Bound bound = bound_of(counts);
      if (bound < below) found.push_back({{.from = from, .to = to}, bound});
      --counts[to];
    }
    ++counts[from];
  }
  std::ranges::stable_sort(found, {}, &BoundedMove<Bound>::bound);
  return found;
}

}  // namespace dynmo::plan
