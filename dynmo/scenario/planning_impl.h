// SPDX-License-Identifier: Apache-2.0
#pragma once

// Connects a simulated run with the controller (control/controller.h): plans over the ranks that
// are there, and what measuring would give.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dynmo/control/controller.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/recording.h"
#include "dynmo/plan/plan.h"
#include "dynmo/scenario/policy_name.h"
#include "dynmo/scenario/scenario.h"

namespace dynmo::scenario {

// Plans are over all positions of the pipeline; the policy plans over those that are there.
[[nodiscard]] plan::Plan to_present(const plan::Plan& plan, const std::vector<int>& present);
[[nodiscard]] plan::Plan to_all(const plan::Plan& plan, const std::vector<int>& present, int ranks);

// training.recompute of a scenario that is valid.
[[nodiscard]] plan::Recompute recompute_of(const Scenario& scenario);

[[nodiscard]] control::ControllerOptions controller_options(const Scenario& scenario,
                                                            const Policy& policy);

// The policy's cut from scratch of the costs `model`, of generation `generation`. kInfeasible if
// none fits the memory.
[[nodiscard]] Expected<plan::Plan> propose(const Scenario& scenario, const Policy& policy,
                                           const cost::ModelCost& model,
                                           const cost::Cluster& cluster,
                                           const std::vector<int>& present, Generation generation);

// A plan of the dense model for `model`, which may have layers besides: the slices of the heads of
// exits. Each of them goes where the layer before it is.
[[nodiscard]] plan::Plan with_layers_of(plan::Plan plan, const cost::ModelCost& dense,
                                        const cost::ModelCost& model);

// Positions that are there in the first step, ascending: before it, its events have come.
[[nodiscard]] std::vector<int> first_ranks(const Scenario& scenario);
// A recorded run that began with as many ranks and replicas: its controller is fed with what was
// measured, so it decides as it did there where the same ranks come and go. null: none.
[[nodiscard]] const dynamism::Recording* recording_of(const dynamism::LoadModel& load,
                                                      const Scenario& scenario,
                                                      const Policy& policy);
// So many ranks as such a run's controller knows them.
[[nodiscard]] cost::Cluster recorded_cluster(const dynamism::Recording& recording,
                                             const Scenario& scenario, std::size_t ranks,
                                             const cost::StepSample& overhead);
// Makes the profiler with the measurements before the first step of the recorded run.
[[nodiscard]] control::Profiler recorded_profiler(const dynamism::Recording& recording,
                                                  const cost::ModelCost& known,
                                                  const control::ControllerOptions& options);

// Seconds that a plan of the policy takes.
[[nodiscard]] double plan_s(const Scenario& scenario, const Policy& policy);

struct Measuring {
  const Scenario& scenario;
  const Policy& policy;
  bool counts_work = false;  // LoadModel::counts_work
};
// Step `step`, whose costs are `truth`, with the scenario's noise of measuring and charges.
[[nodiscard]] cost::Observation measured(const Measuring& how, std::int64_t step,
                                         const cost::ModelCost& truth);

}  // namespace dynmo::scenario
