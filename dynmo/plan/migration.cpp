// SPDX-License-Identifier: Apache-2.0
#include "dynmo/plan/migration.h"

#include "dynmo/core/check.h"

namespace dynmo::plan {
namespace {

// Gradients do not travel: a plan changes between steps, when they are zero.
Bytes bytes_on_the_wire(const cost::LayerCost& layer) {
  if (layer.frozen) return layer.parameter_bytes;
  return layer.parameter_bytes + layer.optimizer_bytes;
}

}  // namespace

Bytes Migration::bytes() const {
  Bytes sum;
  for (const LayerMove& move : moves) sum += move.bytes;
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
                               .bytes = bytes_on_the_wire(model.layers[layer.index()])});
  }
  return migration;
}

}  // namespace dynmo::plan
