// SPDX-License-Identifier: Apache-2.0
#pragma once

// The time of a run's steps under other plans: the first one kept, and the best one of every step.
// Moves between them are free, and costs are known without measuring.

#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/scenario/job.h"
#include "dynmo/scenario/policy_name.h"
#include "dynmo/scenario/replay_impl.h"
#include "dynmo/scenario/run.h"

namespace dynmo::scenario {

class OtherPlans {
 public:
  OtherPlans(const Job& job, const Policy& policy, const Grid& grid, plan::Plan first);

  // Adds a step with the costs `model`. Returns kInfeasible if the balancer finds no cut for them.
  [[nodiscard]] Expected<void> add(const cost::ModelCost& model);
  [[nodiscard]] const OtherTimes& times() const { return times_; }

 private:
  struct Choice {
    plan::Plan plan;
    plan::LayerSet recomputed = {};
  };

  // Sets the layers that the plan recomputes, as a run does.
  [[nodiscard]] Expected<void> choose_recomputed(Choice& choice,
                                                 const cost::ModelCost& model) const;

  const Job& job_;
  const Policy& policy_;
  StepReplayer kept_;
  StepReplayer newest_;
  StepReplayer past_;
  Choice first_;
  std::optional<Choice> best_ = {};  // of the newest step
  cost::ModelCost model_ = {};       // costs of the newest step
  OtherTimes times_ = {};
};

}  // namespace dynmo::scenario
