// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a run left behind on rank 0, step by step, and what two runs of the same training say about
// balancing: speed-up, the best possible one, the cost of the decisions, predicted against measured
// step time.

#include <cstdint>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/observe/summary.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/pipeline.h"

namespace dynmo::train {

struct StepEntry {
  double loss = 0;
  double step_s = 0;       // balancing included
  double balancing_s = 0;  // profile + plan + migrate
  double predicted_s = 0;  // 0: none
  double imbalance = 0;
  double bubble = 0;
  int frozen_layers = 0;
  bool moved = false;
  std::vector<runtime::LayerSample> layers;
  plan::Plan plan;
};

struct RunSeries {
  std::string name;
  std::int64_t tokens_per_step = 0;
  int replicas = 1;
  std::vector<StepEntry> steps;
  double profile_s = 0;
  double plan_s = 0;
  double migrate_s = 0;
  double reduction_s = 0;  // exposed
  int moved_layers = 0;
  Bytes moved_bytes;
  std::vector<std::pair<std::int64_t, double>> validation;  // step, loss
  int checkpoints_written = 0;
  int checkpoints_failed = 0;
  double checkpoint_s = 0;                   // that rank 0 stood still for them
  std::vector<observe::TrafficRow> traffic;  // of all steps, once the run is over

  void add(const runtime::StepReport& report, const plan::Plan& plan);
  [[nodiscard]] double seconds() const;  // all steps
  [[nodiscard]] double tokens_per_s() const;
};

struct PredictionError {
  int steps = 0;      // predicted ones, from the first move on (all of them where nothing moved)
  double median = 0;  // of |predicted - measured| / measured; measured without the balancing itself
  double worst = 0;
};
[[nodiscard]] PredictionError prediction_error(const RunSeries& run);

struct Comparison {
  double speedup = 0;  // tokens/s of `balanced` / `baseline`
  // Simulated: baseline's cuts / the best of all cuts at every step; NaN for schedules with several
  // stages a rank, of which not all cuts are known.
  double best_speedup = 0;
};

// Best possible, step by step: the baseline's cut simulated with the costs measured in its own run,
// over the best of all cuts with the costs measured in the balanced run. Two sets of costs, because
// a rank that waits leaves caches, memory bandwidth and power to the others: a layer takes longer
// where all ranks are busy, whatever the cut. `known` gives names and bytes; `ranks` are those of
// one replica.
[[nodiscard]] Expected<Comparison> compare(const RunSeries& baseline, const RunSeries& balanced,
                                           const cost::ModelCost& known, int micro_batches,
                                           int accumulation, int ranks);

// Fields of "dynmo-summary-1" of one run; `ranks` of one replica.
[[nodiscard]] observe::RunSummary summarize(const RunSeries& run, int ranks);
// Digest over the bits of all losses: equal numbers, equal digest.
[[nodiscard]] std::string loss_digest(const RunSeries& run);

}  // namespace dynmo::train
