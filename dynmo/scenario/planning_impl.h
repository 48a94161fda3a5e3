// SPDX-License-Identifier: Apache-2.0
#pragma once

// Connects a simulated run with the controller (control/controller.h). It makes plans for the
// present ranks, and simulates measurements.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
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

// Converts a plan over all positions of the pipeline to one over the present positions, for the
// policy. to_all() converts it back.
[[nodiscard]] plan::Plan to_present(const plan::Plan& plan, const std::vector<int>& present);
[[nodiscard]] plan::Plan to_all(const plan::Plan& plan, const std::vector<int>& present, int ranks);

// The plans in force in a step, over all positions: that of the next step, and that of this step
// while layers move.
struct PlansInForce {
  plan::Plan now = {};
  std::optional<plan::Plan> left = {};  // of this step, while layers move to `now`

  // Returns the plan of the running step: the previous one, if layers move during the step.
  [[nodiscard]] const plan::Plan& of_step() const { return left ? *left : now; }
};

// Returns training.recompute of a valid scenario.
[[nodiscard]] plan::Recompute recompute_of(const Scenario& scenario);

[[nodiscard]] control::ControllerOptions controller_options(const Scenario& scenario,
                                                            const Policy& policy);

// Returns the policy's cut for the costs `model`, made without regard to the current plan, with
// generation `generation`. Returns kInfeasible if none fits the memory.
[[nodiscard]] Expected<plan::Plan> propose(const Scenario& scenario, const Policy& policy,
                                           const cost::ModelCost& model,
                                           const cost::Cluster& cluster,
                                           const std::vector<int>& present, Generation generation);

// Returns a plan of the dense model for `model`, which may have additional layers: the slices of
// the heads of exits. Each is placed with the layer before it.
[[nodiscard]] plan::Plan with_layers_of(plan::Plan plan, const cost::ModelCost& dense,
                                        const cost::ModelCost& model);

// Returns the present positions in the first step, ascending, after the events before that step.
[[nodiscard]] std::vector<int> first_ranks(const Scenario& scenario);
// Returns the recording of a run that began with the same ranks and replicas, or null. With its
// measurements, a controller repeats the decisions of that run if the same ranks come and go.
[[nodiscard]] const dynamism::Recording* recording_of(const dynamism::LoadModel& load,
                                                      const Scenario& scenario,
                                                      const Policy& policy);
struct SimulatedLoad {
  const dynamism::LoadModel& model;
  const dynamism::Recording* recording;  // that of recording_of()
};
// Returns a cluster of `ranks` ranks, as the controller of the recorded run knew them.
[[nodiscard]] cost::Cluster recorded_cluster(const dynamism::Recording& recording,
                                             const Scenario& scenario, std::size_t ranks,
                                             const cost::StepSample& overhead);
// Makes the profiler with the measurements before the first step of the recorded run.
[[nodiscard]] control::Profiler recorded_profiler(const dynamism::Recording& recording,
                                                  const cost::ModelCost& known,
                                                  const control::ControllerOptions& options);

// Returns the seconds for making a plan of the policy.
[[nodiscard]] double plan_s(const Scenario& scenario, const Policy& policy);

struct Measuring {
  const Scenario& scenario;
  const Policy& policy;
  bool counts_work;  // LoadModel::counts_work
  const plan::Plan& plan;
  const std::map<Rank, double>& speeds;  // of slowed ranks
};
// Returns the observation of step `step` with the costs `truth`. It has the scenario's measuring
// noise and charges.
[[nodiscard]] cost::Observation measured(const Measuring& how, std::int64_t step,
                                         const cost::ModelCost& truth);

}  // namespace dynmo::scenario
