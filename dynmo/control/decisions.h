// SPDX-License-Identifier: Apache-2.0
#pragma once

// A pipeline's side of the controller (controller.h): it tells it what the ranks have measured
// together and asks it; from the same costs it chooses the layers to recompute and predicts the
// time of a step. It knows neither tensors nor transports: it is fed with what all ranks have
// alike, so it says the same on all of them.

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
  cost::Cluster cluster = {};  // nodes and links of a replica's ranks; no ranks: all on one node
  std::vector<std::string> names = {};  // of the ranks, for people; none: "rank 0", ...
};

// One step, as all ranks exchanged it.
struct ExchangedStep {
  std::vector<cost::LayerSample> layers;  // by LayerId
  StepStats stats = {};  // migrate_s is 0 if no layer has moved in this group
};

class Decisions {
 public:
  // `ranks` are those of a replica.
  Decisions(Controller controller, int ranks, DecisionsOptions options);

  [[nodiscard]] const Controller& controller() const { return controller_; }
  // The controller, for the next group; this object is done with.
  [[nodiscard]] Controller take_controller() { return std::move(controller_); }

  // Goes on from what another pipeline of the same model and group has measured.
  void use(const Profiler& measured) { controller_.use(measured); }
  // Names and bytes of the layers are others now.
  void know(const cost::ModelCost& known) { controller_.know(known); }
  // One more step under `plan`.
  void observe(const ExchangedStep& step, const plan::Plan& plan, int frozen_layers);
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
  // Asks the controller at the boundary before `now.step` (Controller::decide, vacate,
  // release).
  [[nodiscard]] Expected<std::optional<Decision>> decide(const Now& now);
  [[nodiscard]] Expected<Decision> vacate(const Now& now, const std::vector<Rank>& kept);
  [[nodiscard]] std::optional<Release> release(const plan::Plan& plan, std::int64_t step) {
    return controller_.release(plan, step);
  }
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
  // Duration of a step, by replay of the plan; 0: nothing was measured.
  [[nodiscard]] double predicted_step_s(const Now& now) const;
  [[nodiscard]] const Profiler& profiler() const { return controller_.profiler(); }
  // The newest step, as the controller has seen it, and what was announced before it.
  [[nodiscard]] const cost::Observation& observed() const { return observed_; }
  [[nodiscard]] cost::Announced announced() const { return announced_; }
  // Predictions contain the time of summing gradients over the replicas.
  [[nodiscard]] bool knows_reduction() const;
  [[nodiscard]] double own_plan_s() const { return own_plan_s_; }  // this rank's last decision

  // The ranks of a replica and their links, as measured so far: what plans are made for.
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
