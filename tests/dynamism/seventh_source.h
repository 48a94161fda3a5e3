// SPDX-License-Identifier: Apache-2.0
#pragma once

// A source that the registry does not have, for tests that everything follows from an entry: layer
// dropping (Fan et al. 2019), whose load is the dense one.

#include <utility>
#include <vector>

#include "dynmo/dynamism/registry.h"

namespace dynmo::dynamism {

struct LayerDropOptions {
  double rate = 0.2;
  std::int64_t every = 2;
  double jitter = 0;
};

inline std::vector<SourceKey> keys_of(LayerDropOptions& o) {
  return {
      {.name = "rate", .field = &o.rate, .allowed = between(0, 1), .help = "of the blocks"},
      {.name = "every", .field = &o.every, .allowed = at_least(1), .help = "blocks"},
      {.name = "jitter",
       .field = &o.jitter,
       .allowed = between(0, 1),
       .help = "of a step",
       .used_by = UsedBy::kLoad},
  };
}

inline Expected<void> check(const LayerDropOptions& options) {
  return check_key_values("layer_drop", options);
}

inline Expected<void> check_training(const LayerDropOptions& /*options*/,
                                     const TrainingSetting& setting) {
  if (!setting.tied_embeddings) return {};
  return make_error(ErrorCode::kBadInput, "layer_drop.enabled is true with tied embeddings");
}

inline Expected<std::unique_ptr<LoadModel>> make_layer_drop(const LayerDropOptions& options,
                                                            const LoadInputs& inputs) {
  DYNMO_TRY(check(options));
  DYNMO_ASSIGN(cost::ModelCost model, cost::transformer_costs(inputs.shape, inputs.device));
  for (cost::LayerCost& layer : model.layers) layer.forward_s *= 1 - options.rate;
  return make_static_load(std::move(model));
}

// The sources of the registry and this one.
inline std::vector<SourceEntry> seven_entries() {
  std::vector<SourceEntry> entries = built_in_sources();
  entries.push_back(source_entry<LayerDropOptions, make_layer_drop>("layer_drop"));
  entries.back().trains = true;
  return entries;
}
inline SourceOptions seven_sources() { return SourceOptions(seven_entries()); }

}  // namespace dynmo::dynamism
