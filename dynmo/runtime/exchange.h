// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the ranks tell each other at the end of a step: one message of a fixed size from each to
// all, after which they know the same and can decide alike.

#include <map>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/grid.h"
#include "dynmo/runtime/profiler.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// One rank's part.
struct OwnFigures {
  struct Layer {
    LayerSample sample;
    double squared_norm = 0;  // of the gradients
  };
  std::map<LayerId, Layer> layers;  // that it owns
  std::vector<double> losses;  // by micro-batch of the replica; empty unless the last stage is here
  double busy_s = 0;
  double overhead_s = 0;  // of the step before, beside its schedule and update
  double plan_s = 0;
  double migrate_s = 0;
  double beside_s = 0;  // of its actions, beside layers and waiting
  double actions = 0;
  double message_s = 0;  // here and below 0: not measured by this rank
  double reduction_bytes_per_s = 0;
};

// The whole, equal on all ranks.
struct Exchange {
  std::vector<LayerSample> layers;    // means over the replicas
  std::vector<double> squared_norms;  // of the gradients, by layer
  std::vector<double> losses;         // by micro-batch of the step
  std::vector<double> busy_s;         // by rank of the group
  StepSample beside;
  double plan_s = 0;  // largest of any rank
  double migrate_s = 0;
};

// Called by all ranks with the plan of the step. Requires at most `micro_batches` losses, which is
// those of a replica: missing ones are 0.
[[nodiscard]] Expected<Exchange> exchange(const Grid& grid, transport::Tag tag,
                                          const plan::Plan& plan, int micro_batches,
                                          const OwnFigures& own);

}  // namespace dynmo::runtime
