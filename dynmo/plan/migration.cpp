// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/migration.h"

#include "dynmo/core/check.h"

namespace dynmo::plan {
// Gradients are counted apart: between two steps they are zero, and do not travel.
Bytes moved_bytes(const cost::LayerCost& layer) {
  if (layer.frozen) return layer.parameter_bytes;
  return layer.parameter_bytes + layer.optimizer_bytes;
}

Bytes Migration::bytes() const {
  Bytes sum;
  for (const LayerMove& move : moves) sum += move.bytes;
  return sum;
}

Bytes Migration::gradient_bytes(const cost::ModelCost& model) const {
  Bytes sum;
  for (const LayerMove& move : moves) {
    const cost::LayerCost& layer = model.layers[move.layer.index()];
    if (!layer.frozen) sum += layer.gradient_bytes;
  }
  return sum;
}

Migration difference(const Plan& from, const Plan& to, const cost::ModelCost& model) {
  DYNMO_CHECK(from.layers() == model.size() && to.layers() == model.size(),
              "two plans over {} layers, got {} and {}", model.size(), from.layers(), to.layers());
  Migration migration;
  for (std::int32_t i = 0; i < model.size(); ++i) {
    const LayerId layer{i};
    const Rank source = from.owner(layer);
    const Rank target = to.owner(layer);
    if (source == target) continue;
    migration.moves.push_back({.layer = layer,
                               .from = source,
                               .to = target,
                               .bytes = moved_bytes(model.layers[layer.index()])});
  }
  return migration;
}

std::vector<Rank> owners(const Plan& plan) {
  std::vector<Rank> ranks;
  for (const PlanStage& stage : plan.stages) {
    ranks.insert(ranks.end(), static_cast<std::size_t>(stage.layers.count), stage.rank);
  }
  return ranks;
}

std::vector<Rank> Migration::apply(std::vector<Rank> owners) const {
  for (const LayerMove& move : moves) {
    DYNMO_CHECK(move.layer.index() < owners.size() && owners[move.layer.index()] == move.from,
                "layer {} on rank {}", move.layer, move.from);
    owners[move.layer.index()] = move.to;
  }
  return owners;
}

}  // namespace dynmo::plan
