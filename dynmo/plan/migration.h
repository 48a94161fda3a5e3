// SPDX-License-Identifier: Apache-2.0
#pragma once

// The difference of two plans: which layers change ranks, in an order both sides derive alike.

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
  Bytes
      bytes;  // parameters and optimizer state on the wire (gradients are zero at a step boundary)
  friend bool operator==(const LayerMove&, const LayerMove&) = default;
};

struct Migration {
  std::vector<LayerMove> moves;  // ascending by layer
  [[nodiscard]] Bytes bytes() const;
};

// Requires two valid plans over the layers of `model`.
[[nodiscard]] Migration difference(const Plan& from, const Plan& to, const cost::ModelCost& model);

}  // namespace dynmo::plan
