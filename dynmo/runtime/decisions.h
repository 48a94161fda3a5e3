// SPDX-License-Identifier: Apache-2.0
#pragma once

// A pipeline's side of the controller (control/controller.h): it tells it what the ranks have
// measured together and asks it; from the same costs it chooses the layers to recompute and
// predicts the time of a step. It knows neither tensors nor transports: it is fed with what all
// ranks have alike, so it says the same on all of them.

#include <cstdint>
#include <optional>
#include <vector>

#include "dynmo/control/controller.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/runtime/exchange.h"
#include "dynmo/runtime/pipeline_options.h"

namespace dynmo::runtime {

class Decisions {
 public:
  // `known` gives names and bytes of the layers; `ranks` are those of a replica. No decision
  // expects more of the past than `first_step`.
  Decisions(cost::ModelCost known, int ranks, const PipelineOptions& options,
            std::int64_t first_step);

  // Goes on from what another pipeline of the same model and group has measured.
  void use(const control::Profiler& measured) { controller_.use(measured); }
  // Begins anew from costs that an earlier group has measured, given alike to all ranks: one
  // measurement, so that nothing is decided before the new group has measured for itself.
  void use(const cost::ModelCost& costs, const plan::Plan& plan) { controller_.use(costs, plan); }
  // Names and bytes of the layers are others now.
  void know(const cost::ModelCost& known) { controller_.know(known); }
  // One more step under `plan`, as all ranks exchanged it.
  void observe(const Exchange& step, const plan::Plan& plan, int frozen_layers);
  void forget_times() { controller_.forget_times(); }
  // Before step `step`.
  void announce(cost::Announced what, std::int64_t step);

  // Where the layers lie, as far as a decision asks for it.
  struct Now {
    const plan::Plan& plan;
    std::int64_t step = 0;
    int frozen_layers = 0;
    const plan::LayerSet& recomputed;
  };
  // What the controller says at the boundary before `now.step`.
  [[nodiscard]] Expected<std::optional<control::Decision>> decide(const Now& now);
  // A decision to migrate was carried out, or was not.
  void moved(Bytes bytes) { moved_ = bytes; }
  void not_moved() { controller_.not_moved(); }

  // Nullopt before anything was measured.
  [[nodiscard]] std::optional<cost::ModelCost> costs(int frozen_layers) const {
    return profiler().costs(frozen_layers);
  }
  // Chosen by costs that all ranks have alike; none before anything was measured (kAuto).
  // kInfeasible: the plan does not fit the memory with every layer recomputed.
  [[nodiscard]] Expected<plan::LayerSet> recomputed_under(const plan::Plan& plan,
                                                          int frozen_layers) const;
  // The balancer's plan on these positions alone, ascending, and what a step takes under it and
  // under the plan in force, by replay. A schedule kind that so few ranks cannot run becomes 1F1B.
  struct Prospect {
    plan::Plan plan;
    double now_s = 0;
    double then_s = 0;
  };
  // kInfeasible: no such plan fits the memory. kBadInput: nothing was measured yet.
  [[nodiscard]] Expected<Prospect> prospect_on(const std::vector<Rank>& kept, const Now& now) const;
  // Of a step, by replay of the plan; 0: nothing was measured.
  [[nodiscard]] double predicted_step_s(const Now& now) const;
  [[nodiscard]] const control::Profiler& profiler() const { return controller_.profiler(); }
  // The newest step, as the controller has seen it, and what was announced before it.
  [[nodiscard]] const cost::Observation& observed() const { return observed_; }
  [[nodiscard]] cost::Announced announced() const { return announced_; }
  // Predictions contain the time of summing gradients over the replicas.
  [[nodiscard]] bool knows_reduction() const;
  [[nodiscard]] double own_plan_s() const { return own_plan_s_; }  // this rank's last decision

 private:
  [[nodiscard]] cost::Cluster cluster() const;

  PipelineOptions options_;
  int ranks_;
  control::Controller controller_;
  cost::Observation observed_;
  cost::Announced announced_ = cost::Announced::kNothing;
  Bytes moved_;  // by the newest move
  double own_plan_s_ = 0;
};

}  // namespace dynmo::runtime
