// SPDX-License-Identifier: Apache-2.0
#pragma once

// Simulates one step of all replicas. It keeps the lowered schedule while the plan is the same, and
// the last result while the costs are, too. Most steps of a run repeat the last one.

#include <optional>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/scenario/grid.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::scenario {

struct StepMeasure {
  double step_s = 0;
  double ideal_step_s = 0;           // all work over the speed of all ranks
  double bubble = 0;                 // of the ranks in use
  double imbalance = 0;              // max / mean - 1 of the work / speed of the ranks in use
  int positions = 0;                 // in use
  bool fits = true;                  // every rank's memory
  schedule::Timeline timeline = {};  // of the slowest replica, if asked for
};

enum class Timelines { kLeftOut, kKept };

class StepReplayer {
 public:
  StepReplayer(Grid grid, int micro_batches)
      : grid_(std::move(grid)), micro_batches_(micro_batches) {}

  // Returns the result of a step whose plan recomputes the layers `again`. `model` has the costs
  // without that. A rank's memory includes what a second forward restores. The result is valid
  // until the next call. Returns kBadInput as evaluate() and simulate() do.
  [[nodiscard]] Expected<const StepMeasure*> step(const plan::Plan& plan,
                                                  const cost::ModelCost& model,
                                                  const plan::LayerSet& again = {},
                                                  Timelines timelines = Timelines::kLeftOut);
  [[nodiscard]] const Grid& grid() const { return grid_; }
  void set_grid(Grid grid);

 private:
  [[nodiscard]] Expected<void> prepare(const plan::Plan& plan, const cost::ModelCost& model);

  Grid grid_;
  int micro_batches_;
  std::optional<plan::Plan> plan_;
  int frozen_ = -1;
  schedule::Schedule lowered_;
  cost::ModelCost model_;
  plan::LayerSet again_;
  std::optional<StepMeasure> last_;
};

}  // namespace dynmo::scenario
