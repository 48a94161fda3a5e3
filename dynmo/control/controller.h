// SPDX-License-Identifier: Apache-2.0
#pragma once

// The loop that decides: observe a step, decide at a boundary between two. `dynmo train` runs it on
// every rank, `dynmo simulate` on loads; window, noise, gates, horizon and the costs of deciding
// and moving are here and nowhere else. Deterministic: ranks that are fed alike decide alike.
//
// It plans for one of five causes (Cause in policy.h):
//   known      the work has changed and training says so: once its new costs are known, which is
//              at once where they follow from `Boundary::known` and after one step otherwise;
//              predicted ones are not certain: they need as much evidence as confirmed ones
//   confirmed  three steps later, of a change whose costs had to be measured
//   found      the newest steps are of other work than the older ones (find_change.h)
//   waited     a move was too dear, and the steps since have lacked as much as it costs
//   drift      looks 1, 2, 4, ... steps apart, where a stage's share of the work has changed since
//              the last plan
// Found changes and drift may spend a two-hundredth of the time of training on plans that lead to
// no move.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/control/policy.h"
#include "dynmo/control/profiler.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"

namespace dynmo::control {

struct ControllerOptions {
  PolicyOptions policy = {};
  int window = 5;                  // least steps
  int micro_batches = 1;           // of one replay of the schedule
  int accumulation = 1;            // replays a step
  std::int64_t steps = 0;          // of the run
  std::int64_t horizon_steps = 0;  // a gain is expected to last; 0: as long as loads did so far
};

// Between two steps.
struct Boundary {
  const plan::Plan& plan;  // in force
  std::int64_t step = 0;   // the one that comes
  // Names, bytes and what is frozen; its times are not used.
  const cost::ModelCost& known;
  const cost::Cluster& cluster;  // the plan's ranks
  plan::LayerSet recomputed = {};
};

class Controller {
 public:
  // `known` as Profiler's. The run, or its part, begins at `first_step`.
  Controller(cost::ModelCost known, ControllerOptions options, std::int64_t first_step = 0);

  // Goes on from what another one has measured, of the same model.
  void use(const Profiler& measured) { profiler_ = measured; }
  // Begins anew from costs that are given, as from one measured step.
  void use(const cost::ModelCost& costs, const plan::Plan& plan);
  // Names and bytes of the layers are others now.
  void know(const cost::ModelCost& known) { profiler_.know(known); }
  // One more step under `plan`, with so many frozen layers.
  void observe(const cost::Observation& step, const plan::Plan& plan, int frozen_layers = 0);
  // Before step `step`.
  void announce(cost::Announced what, std::int64_t step);
  void forget_times() { profiler_.forget_times(); }

  // What to do before step `now.step`; nullopt where there is nothing to plan for (no plan was
  // made). Times are of a step. The caller carries a decision to migrate out, or says not_moved().
  [[nodiscard]] Expected<std::optional<Decision>> decide(const Boundary& now);
  void not_moved() { moved_ = false; }

  // Costs under which `accumulation` replays of the schedule take as long as a step: the update,
  // once a step, is shared out over them. nullopt before anything was measured.
  [[nodiscard]] std::optional<cost::ModelCost> costs(const cost::ModelCost& known,
                                                     const plan::LayerSet& recomputed = {}) const;
  [[nodiscard]] const Profiler& profiler() const { return profiler_; }

 private:
  [[nodiscard]] std::optional<Cause> cause() const;
  [[nodiscard]] bool drifted(const Boundary& now, const cost::ModelCost& costs) const;
  [[nodiscard]] Cause evidence(Cause cause) const;
  [[nodiscard]] double horizon_steps(Cause cause, std::int64_t step) const;
  void remember(Cause cause, const Boundary& now, const cost::ModelCost& costs,
                const Decision& decision);
  [[nodiscard]] std::string why(Cause cause, const Boundary& now) const;

  ControllerOptions options_;
  Profiler profiler_;
  cost::Charges charges_;
  std::int64_t observed_ = 0;  // steps

  // What there is to plan for.
  bool announced_ = false;
  bool measured_anew_ = false;  // the announced change has to be measured ...
  bool waiting_ = false;        // ... before a plan is made for it
  std::optional<FoundChange> found_;
  std::optional<std::int64_t> confirm_at_;  // as observed_ counts; here and below
  std::int64_t look_at_ = 0;
  std::int64_t wait_ = 1;  // between two looks for drift
  std::int64_t decided_at_ = 0;

  // How long loads last.
  std::int64_t changed_step_;         // of the newest change that was known ...
  std::int64_t change_interval_ = 0;  // ... and steps since the one before; 0: there was none
  std::int64_t lasts_since_;          // the same, or the newest move
  bool known_ = false;                // the newest change was, not found

  // What the last plan was made for.
  std::vector<double> stage_shares_;  // of the work; empty: none yet
  std::vector<plan::PlanStage> stages_;
  int noisy_window_ = 0;  // its steps where the noise forbade a move; 0: it did not

  // A move that was too dear.
  double lacked_s_ = 0;   // in a step, for want of it; 0: there is none
  double forgone_s_ = 0;  // in all steps since
  double dear_s_ = 0;     // its cost, less what it was expected to gain

  // Plans that led to no move.
  bool planned_ = false;  // since the last observation, and ...
  bool moved_ = false;    // ... it led to one
  double fruitless_s_ = 0;
  double trained_s_ = 0;
};

// `cluster` as the measurements beside the layers have it: overhead of an action, latency of a
// message, and of several replicas the bandwidth of their reduction, of which `accumulation`
// replays have one.
[[nodiscard]] cost::Cluster as_measured(cost::Cluster cluster, const cost::StepSample& beside,
                                        int replicas, int accumulation);

}  // namespace dynmo::control
