// SPDX-License-Identifier: Apache-2.0
#pragma once

// A pipeline's interface to the controller (controller.h). It passes on the common measurements of
// all ranks, and returns decisions. From the same costs it chooses the layers to recompute and
// predicts the time of a step. It does not know tensors or transports. All ranks give it the same
// inputs, so its results are the same on all of them.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/control/controller.h"
#include "dynmo/control/step_stats.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"

namespace dynmo::control {

struct DecisionsOptions {
  ControllerOptions controller = {};
  Bytes memory = cost::kUnlimitedMemory;  // of a rank
  int replicas = 1;
  cost::Cluster cluster = {};           // nodes and links of a replica's ranks; no ranks: one node
  std::vector<std::string> names = {};  // of the ranks, for the user; none: "rank 0", ...
};

// One step, as all ranks exchanged it.
struct ExchangedStep {
  std::vector<cost::LayerSample> layers;  // by LayerId
  StepStats stats = {};                   // migrate_s is 0 if no layer has moved in this group
};

class Decisions {
 public:
  // Wraps a controller. `ranks` are those of a replica.
  Decisions(Controller controller, int ranks, DecisionsOptions options);

  [[nodiscard]] const Controller& controller() const { return controller_; }
  // Moves the controller out, for the next group. This object is not used afterwards.
  [[nodiscard]] Controller take_controller() { return std::move(controller_); }

  // Continues from the measurements of another pipeline of the same model and group.
  void use(const Profiler& measured) { controller_.use(measured); }
  // Sets new names and bytes of the layers.
  void know(const cost::ModelCost& known) { controller_.know(known); }
  void observe(const ExchangedStep& step, const plan::Plan& plan, int frozen_layers);
  void forget_times() { controller_.forget_times(); }
  void announce(cost::Announced what, std::int64_t step);

  // The state of a pipeline between two steps.
  struct Now {
    const plan::Plan& plan;
    std::int64_t step = 0;
    int frozen_layers = 0;
    const plan::LayerSet& recomputed;
  };
  // Calls the controller at the boundary before `now.step` (Controller::decide, vacate, release).
  [[nodiscard]] Expected<std::optional<Decision>> decide(const Now& now);
  [[nodiscard]] Expected<Decision> vacate(const Now& now, const std::vector<Rank>& kept);
  [[nodiscard]] std::optional<Release> release(const plan::Plan& plan, std::int64_t step) {
    return controller_.release(plan, step);
  }
  // Reports whether the newest decision to migrate was carried out, and the bytes that it moved.
  void moved(Bytes bytes) { moved_ = bytes; }
  void not_moved() { controller_.not_moved(); }

  // Returns the costs, or nullopt before the first measurement.
  [[nodiscard]] std::optional<cost::ModelCost> costs(int frozen_layers) const {
    return profiler().costs(frozen_layers);
  }
  // Returns the layers to recompute, chosen by costs that are equal on all ranks. With kAuto,
  // returns none before the first measurement. Returns kInfeasible if the plan does not fit the
  // memory with every layer recomputed.
  [[nodiscard]] Expected<plan::LayerSet> recomputed_under(const plan::Plan& plan,
                                                          int frozen_layers) const;
  // Returns the duration of a step, by replay of the plan, or 0 before the first measurement.
  [[nodiscard]] double predicted_step_s(const Now& now) const;
  [[nodiscard]] const Profiler& profiler() const { return controller_.profiler(); }
  // Returns the newest observed step. announced() returns the change announced before it.
  [[nodiscard]] const cost::Observation& observed() const { return observed_; }
  [[nodiscard]] cost::Announced announced() const { return announced_; }
  // Returns whether predictions include the time of summing gradients over the replicas.
  [[nodiscard]] bool knows_reduction() const;
  // Returns the changes of rank speeds that the newest step has shown.
  [[nodiscard]] const std::vector<SpeedChange>& speed_changes() const {
    return controller_.speeds().changes();
  }
  [[nodiscard]] double own_plan_s() const { return own_plan_s_; }  // this rank's last decision

  // Returns the ranks of a replica at full speed and their links, as measured so far.
  [[nodiscard]] cost::Cluster cluster() const;

 private:
  DecisionsOptions options_;
  int ranks_;
  Controller controller_;
  cost::Observation observed_;
  cost::Announced announced_ = cost::Announced::kNothing;
  Bytes moved_;  // by the newest move
  double own_plan_s_ = 0;
};

}  // namespace dynmo::control
