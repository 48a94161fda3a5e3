// SPDX-License-Identifier: Apache-2.0
#pragma once

// The difference of two plans: the layers that change ranks, in an order that both sides derive
// equally. Plans may differ only in the names of equal ranks. Then align() (place.h) finds the
// nearest to another plan.

#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/plan.h"

namespace dynmo::plan {

struct LayerMove {
  LayerId layer;
  Rank from;
  Rank to;
  // Parameters and optimizer state in messages. (Gradients are zero at a step boundary.)
  Bytes bytes;
  friend bool operator==(const LayerMove&, const LayerMove&) = default;
};

// Returns the bytes of a moving layer in messages: parameters and optimizer state, or only
// parameters if it is frozen.
[[nodiscard]] Bytes moved_bytes(const cost::LayerCost& layer);

struct Migration {
  std::vector<LayerMove> moves;  // ascending by layer
  [[nodiscard]] Bytes bytes() const;
  // Returns the bytes of the gradients of the moving layers. For a move during a step, training
  // waits only for these.
  [[nodiscard]] Bytes gradient_bytes(const cost::ModelCost& model) const;
  // Returns the rank of every layer after the migration. `owners` are the ranks before it. Requires
  // moves from the layers' ranks.
  [[nodiscard]] std::vector<Rank> apply(std::vector<Rank> owners) const;
};

// Returns the moves between two valid plans over the layers of `model`.
[[nodiscard]] Migration difference(const Plan& from, const Plan& to, const cost::ModelCost& model);

// Returns the rank of every layer.
[[nodiscard]] std::vector<Rank> owners(const Plan& plan);

}  // namespace dynmo::plan
