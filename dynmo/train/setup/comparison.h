// SPDX-License-Identifier: Apache-2.0
#pragma once

// A comparison reports the effect of balancing in two runs of the same training. It has the
// speed-up and the best possible one.

#include <cstdint>
#include <functional>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/observe/run_history.h"

namespace dynmo::train {

struct Comparison {
  double speedup = 0;  // tokens/s of `balanced` / `baseline`
  // Simulated: baseline's cuts / the best of all cuts at every step. NaN for schedules with several
  // stages a rank, for which not all cuts are known.
  double best_speedup = 0;
  // In some step there were too many cuts to replay. No speed-up can be above best_speedup, which
  // may be unreachable.
  bool best_is_bound = false;
  // Simulated with given costs: baseline's cuts / those of `balanced`, step by step. 0: no given
  // costs.
  double cuts_speedup = 0;
};

// Returns the costs of the layers in a step, if they are known without measuring.
using GivenCosts = std::function<cost::ModelCost(std::int64_t step)>;

// Compares two runs. The best possible speed-up is computed step by step, in at most 256 steps of
// equal distance. The time of the baseline's cut uses the costs of its own run. It is divided by
// that of the best cut, with the costs of the balanced run. There are two sets of costs, because
// waiting ranks leave caches, memory bandwidth and power to the others. So a layer takes longer if
// all ranks are busy, under any cut.
//
// `known` has names and bytes. `ranks` are those of one replica. With `given`, both sides use the
// given costs. Measured costs would favour the best cut, which gains from their noise.
[[nodiscard]] Expected<Comparison> compare(const observe::RunHistory& baseline,
                                           const observe::RunHistory& balanced,
                                           const cost::ModelCost& known, int micro_batches,
                                           int accumulation, int ranks,
                                           const GivenCosts& given = {});

}  // namespace dynmo::train
