// SPDX-License-Identifier: Apache-2.0
#pragma once

// The planning side of a simulated run: it sees costs as a profiler would, with noise, notices that
// they have changed, and asks the policy (control/policy.h) whether to move.

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "dynmo/control/policy.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/propose.h"
#include "dynmo/scenario/policy_name.h"
#include "dynmo/scenario/scenario.h"

namespace dynmo::scenario {

// Plans are over all positions of the pipeline; the policy plans over those that are there.
[[nodiscard]] plan::Plan to_present(const plan::Plan& plan, const std::vector<int>& present);
[[nodiscard]] plan::Plan to_all(const plan::Plan& plan, const std::vector<int>& present, int ranks);

class Controller {
 public:
  Controller(const Scenario& scenario, const Policy& policy)
      : scenario_(scenario), policy_(policy) {}

  // The policy's cut from scratch of the costs `model`, of generation `generation`. kInfeasible if
  // none fits the memory.
  [[nodiscard]] Expected<plan::Plan> propose(const cost::ModelCost& model,
                                             const cost::Cluster& cluster,
                                             const std::vector<int>& present,
                                             Generation generation) const;

  // Something the job knows of has changed: layers frozen, ranks come, a step gone back to.
  void known_change(std::int64_t step);
  // Measures step `step`, whose costs are `truth`.
  void measure(std::int64_t step, const cost::ModelCost& truth);
  // What was decided behind step `step`; nullopt if there was nothing to plan for (no plan was
  // computed). The plan in the decision is over all positions. Requires a measurement, and a plan
  // on ranks that are present.
  [[nodiscard]] Expected<std::optional<control::Decision>> consider(
      std::int64_t step, const plan::Plan& current, const cost::Cluster& cluster,
      const std::vector<int>& present);

 private:
  [[nodiscard]] plan::ProposeOptions proposing() const;
  [[nodiscard]] cost::ModelCost medians() const;
  [[nodiscard]] double relative_noise() const;
  [[nodiscard]] bool drifted(const plan::Plan& plan, const cost::ModelCost& seen) const;
  [[nodiscard]] double horizon_steps(std::int64_t step) const;
  void remember(std::int64_t step, const plan::Plan& plan, const cost::ModelCost& seen);

  const Scenario& scenario_;
  const Policy& policy_;
  std::deque<cost::ModelCost> seen_;
  bool known_ = false;
  std::int64_t known_step_ = 0;      // of the last known change ...
  std::int64_t known_interval_ = 0;  // ... and steps since the one before; 0: there was none
  std::int64_t decided_step_ = 0;
  std::int64_t wait_ = 1;  // steps before drift is looked at again
  plan::Plan reference_plan_;
  std::vector<double> reference_;  // share of each stage in the work, at the last decision
};

}  // namespace dynmo::scenario
