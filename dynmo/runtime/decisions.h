// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the ranks have measured together and what follows from it: costs, the layers to recompute,
// the predicted time of a step, whether to move. It knows neither tensors nor transports: it is fed
// with what all ranks have alike, so it says the same on all of them.

#include <cstdint>
#include <optional>

#include "dynmo/control/policy.h"
#include "dynmo/control/profiler.h"
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
  void use(const control::Profiler& measured) { profiler_ = measured; }
  // Begins anew from costs that an earlier group has measured, given alike to all ranks: one
  // measurement, so that nothing is decided before the new group has measured for itself.
  void use(const cost::ModelCost& costs, const plan::Plan& plan);
  // One more step under `plan`, as all ranks exchanged it.
  void observe(const Exchange& step, const plan::Plan& plan);
  void forget_times() { profiler_.forget_times(); }
  // The layers' work changes from the next step on, for a cause that is known.
  void announce_change();
  // From now on predictions use what was measured beside the layers.
  void take_measures();

  // Where the layers lie, as far as a decision asks for it.
  struct Now {
    const plan::Plan& plan;
    std::int64_t step = 0;
    int frozen_layers = 0;
    const plan::LayerSet& recomputed;
  };
  struct Verdict {
    std::optional<control::Decision> decision;  // none: nobody asked the policy
    double profile_s = 0;                       // by this rank's clock
    double plan_s = 0;
  };
  // What the policy says at the boundary before `now.step`.
  [[nodiscard]] Expected<Verdict> decide(const Now& now);
  // A decision was carried out.
  void moved(std::int64_t step, Bytes bytes);

  // Nullopt before anything was measured.
  [[nodiscard]] std::optional<cost::ModelCost> costs(int frozen_layers) const {
    return profiler_.costs(frozen_layers);
  }
  // Chosen by costs that all ranks have alike; none before anything was measured (kAuto).
  // kInfeasible: the plan does not fit the memory with every layer recomputed.
  [[nodiscard]] Expected<plan::LayerSet> recomputed_under(const plan::Plan& plan,
                                                          int frozen_layers) const;
  // Of a step, by replay of the plan; 0: nothing was measured.
  [[nodiscard]] double predicted_step_s(const Now& now) const;
  [[nodiscard]] const control::Profiler& profiler() const { return profiler_; }
  // Predictions contain the time of summing gradients over the replicas.
  [[nodiscard]] bool knows_reduction() const { return cluster_.replicas > 1; }
  [[nodiscard]] double own_plan_s() const { return own_plan_s_; }  // this rank's last decision

 private:
  [[nodiscard]] std::optional<cost::ModelCost> round_costs(const Now& now) const;
  [[nodiscard]] bool worth_asking(const Now& now, const cost::ModelCost& costs, double noise) const;
  [[nodiscard]] control::PolicyInput policy_input(const Now& now, const cost::ModelCost& costs,
                                                  double noise) const;

  PipelineOptions options_;
  cost::Cluster cluster_;
  control::Profiler profiler_;
  std::optional<cost::ModelCost> planned_for_;  // costs of the last decision that made a plan
  bool known_change_ = false;                   // announced since the last decision
  std::int64_t last_move_;                      // its step
  Bytes moved_;                                 // by it
  double move_cost_s_ = 0;                      // agreed: largest of any rank
  double plan_cost_s_ = 0;                      // agreed: largest of any rank
  double own_plan_s_ = 0;
};

}  // namespace dynmo::runtime
