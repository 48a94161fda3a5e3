// SPDX-License-Identifier: Apache-2.0
#pragma once

// The difference of two plans: which layers change ranks, in an order both sides derive alike; and
// of the plans that are alike but for the names of equal ranks the one nearest to another.

#include <vector>

#include "dynmo/core/ids.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
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

// On the wire: parameters and optimizer state, of a frozen layer its parameters.
[[nodiscard]] Bytes moved_bytes(const cost::LayerCost& layer);

struct Migration {
  std::vector<LayerMove> moves;  // ascending by layer
  [[nodiscard]] Bytes bytes() const;
  // Gradients of the layers that move. A move during a step stops training for them alone.
  [[nodiscard]] Bytes gradient_bytes(const cost::ModelCost& model) const;
  // Rank of every layer after it, from those before. Requires moves from where the layers are.
  [[nodiscard]] std::vector<Rank> apply(std::vector<Rank> owners) const;
};

// Requires two valid plans over the layers of `model`.
[[nodiscard]] Migration difference(const Plan& from, const Plan& to, const cost::ModelCost& model);

// Whether each rank's memory holds a step under `plan` and the layers that `migration` brings it in
// addition. Requires a valid plan; true where the step cannot be evaluated.
[[nodiscard]] bool holds_both(const Plan& plan, const Migration& migration,
                              const cost::ModelCost& model, const cost::Cluster& cluster,
                              int micro_batches);

// Rank of every layer.
[[nodiscard]] std::vector<Rank> owners(const Plan& plan);

// `plan` with equal ranks (same speed, memory and node) permuted so that the migration from `from`
// moves the fewest bytes; of equals the one that leaves most ranks as they are. As only ranks of
// one node change places, every message keeps its link and the step time stays; an adaptive order
// goes with its rank. Exact (an assignment problem, O(n^3) for n equal ranks) up to 512 equal
// ranks; beyond, greedily the pair that keeps most bytes first. Requires two valid plans over the
// layers of `model` and the ranks of `cluster`.
[[nodiscard]] Plan align(const Plan& plan, const Plan& from, const cost::Cluster& cluster,
                         const cost::ModelCost& model);

}  // namespace dynmo::plan
