// SPDX-License-Identifier: Apache-2.0
#pragma once

// A comparison reports what balancing gave in two runs of the same training: speed-up, the best
// possible one, the cost of the decisions, predicted against measured step time.

#include <cstdint>
#include <functional>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/observe/run_history.h"
#include "dynmo/observe/summary.h"

namespace dynmo::train {

struct PredictionError {
  int steps = 0;      // predicted ones, from the first move on (all of them where nothing moved)
  double median = 0;  // of |predicted - measured| / measured; measured without the balancing itself
  double worst = 0;
};
[[nodiscard]] PredictionError prediction_error(const observe::RunHistory& run);

struct Comparison {
  double speedup = 0;  // tokens/s of `balanced` / `baseline`
  // Simulated: baseline's cuts / the best of all cuts at every step; NaN for schedules with several
  // stages a rank, of which not all cuts are known.
  double best_speedup = 0;
  // In some step the cuts were too many to replay them all: no speed-up can be above best_speedup,
  // which need not be within reach.
  bool best_is_bound = false;
  // Simulated with given costs: baseline's cuts / those of `balanced`, step by step. 0: none given.
  double cuts_speedup = 0;
};

// Returns the costs of the layers in a step, where they are known and need not be measured.
using GivenCosts = std::function<cost::ModelCost(std::int64_t step)>;

// Best possible, step by step: the baseline's cut simulated with the costs measured in its own run,
// over the best of all cuts with the costs measured in the balanced run. Two sets of costs, because
// a rank that waits leaves caches, memory bandwidth and power to the others: a layer takes longer
// where all ranks are busy, whatever the cut. `known` gives names and bytes; `ranks` are those of
// one replica. Both with the costs `given`, where there are some: the best cut of every measured
// step gains from its noise, too, which no balancer can.
[[nodiscard]] Expected<Comparison> compare(const observe::RunHistory& baseline,
                                           const observe::RunHistory& balanced,
                                           const cost::ModelCost& known, int micro_batches,
                                           int accumulation, int ranks,
                                           const GivenCosts& given = {});

// Fields of "dynmo-summary-1" of one run; `ranks` of one replica.
[[nodiscard]] observe::RunSummary summarize(const observe::RunHistory& run, int ranks);

}  // namespace dynmo::train
