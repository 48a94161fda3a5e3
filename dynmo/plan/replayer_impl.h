// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replays many cuts of one problem and one placement: what a schedule is depends only on how many
// stages are frozen, so each is made and checked once.

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
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/schedule/placement.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::plan {

class Replayer {
 public:
  // With a chain that recomputes, its memory holds instead of the replay's. Keeps the references.
  Replayer(const cost::ModelCost& model, const cost::Cluster& cluster, int micro_batches,
           schedule::ScheduleKind kind, const internal::Chain* recomputing = nullptr)
      : model_(model),
        cluster_(cluster),
        micro_batches_(micro_batches),
        kind_(kind),
        recomputing_(recomputing),
        placement_(schedule::loop_placement(cluster.size(), 1)),
        checked_(placement_.size() + 1) {}

  // The same for stages on the ranks of `placement`, without recomputation.
  Replayer(const cost::ModelCost& model, const cost::Cluster& cluster, int micro_batches,
           schedule::ScheduleKind kind, std::vector<Rank> placement)
      : model_(model),
        cluster_(cluster),
        micro_batches_(micro_batches),
        kind_(kind),
        recomputing_(nullptr),
        placement_(std::move(placement)),
        checked_(placement_.size() + 1) {}

  // Step time, or nullopt if the memory does not suffice.
  Expected<std::optional<Nanoseconds>> step_time(const std::vector<int>& counts) {
    const Plan plan = make_plan(counts, placement_, cluster_.size(), kind_);
    std::vector<sim::StageCost> costs = stage_costs(plan, model_, cluster_);
    if (recomputing_ != nullptr && !add_recomputation(plan, costs)) {
      return std::optional<Nanoseconds>();
    }
    const auto shape = shape_of(plan, micro_batches_, model_.frozen_layers());
    const auto frozen = static_cast<std::size_t>(
        std::count_if(shape.stages.begin(), shape.stages.end(),
                      [](const schedule::StageShape& stage) { return stage.frozen; }));
    std::optional<sim::CheckedSchedule>& checked = checked_[frozen];
    if (!checked) {
      DYNMO_ASSIGN(const auto compute, schedule::make_schedule(kind_, shape));
      DYNMO_ASSIGN(auto made, sim::CheckedSchedule::make(schedule::lower(compute)));
      checked = std::move(made);
    }
    ++replays_;
    for (const auto& rank : checked->schedule().ranks) {
      actions_ += static_cast<std::int64_t>(rank.size());
    }
    DYNMO_ASSIGN(const sim::SimResult result, sim::simulate(*checked, costs, cluster_));
    if (recomputing_ == nullptr && !fits_memory(result, cluster_))
      return std::optional<Nanoseconds>();
    return std::optional(result.step_time);
  }

  [[nodiscard]] std::int64_t replays() const { return replays_; }
  [[nodiscard]] std::int64_t actions() const { return actions_; }  // of all replays

 private:
  // False if a stage does not fit.
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

  const cost::ModelCost& model_;
  const cost::Cluster& cluster_;
  int micro_batches_;
  schedule::ScheduleKind kind_;
  const internal::Chain* recomputing_;
  std::vector<Rank> placement_;                               // by stage
  std::vector<std::optional<sim::CheckedSchedule>> checked_;  // by frozen stages
  std::int64_t replays_ = 0;
  std::int64_t actions_ = 0;
};

}  // namespace dynmo::plan
