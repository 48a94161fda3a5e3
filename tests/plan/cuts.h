// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random chains and every cut of them, for the oracles of the planner's tests.

#include <functional>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"

namespace dynmo::plan {

// Calls `visit` with every way to give `ranks` ranks one layer or more, lexicographically
// ascending.
inline void for_each_cut(int layers, int ranks,
                         const std::function<void(const std::vector<int>&)>& visit) {
  std::vector<int> counts;
  const std::function<void(int)> extend = [&](int left) {
    const int open = ranks - static_cast<int>(counts.size());
    if (open == 1) {
      counts.push_back(left);
      visit(counts);
      counts.pop_back();
      return;
    }
    for (int take = 1; take <= left - (open - 1); ++take) {
      counts.push_back(take);
      extend(left - take);
      counts.pop_back();
    }
  };
  extend(layers);
}

inline int pick(Rng& rng, int low, int high) {  // in [low, high]
  return low + static_cast<int>(rng.below(static_cast<std::uint64_t>(high - low) + 1));
}

// Layers whose times are whole seconds of at most 20 in all, so that sums and ties are exact.
inline cost::ModelCost whole_number_model(Rng& rng, int layers) {
  cost::ModelCost model;
  const int frozen = pick(rng, 0, 2) == 0 ? pick(rng, 0, layers) : 0;
  for (int i = 0; i < layers; ++i) {
    cost::LayerCost layer;
    layer.name = "layer " + std::to_string(i);
    layer.forward_s = pick(rng, 0, 6);
    layer.backward_input_s = pick(rng, 0, 6);
    layer.backward_weight_s = pick(rng, 0, 6);
    layer.parameter_bytes = Bytes{pick(rng, 0, 9)};
    layer.gradient_bytes = Bytes{pick(rng, 0, 9)};
    layer.optimizer_bytes = Bytes{pick(rng, 0, 9)};
    layer.activation_bytes = Bytes{pick(rng, 0, 9)};
    layer.boundary_bytes = Bytes{pick(rng, 0, 3)};
    layer.frozen = i < frozen || pick(rng, 0, 9) == 0;
    model.layers.push_back(layer);
  }
  return model;
}

// Measured-looking costs: no two alike.
inline cost::ModelCost random_model(Rng& rng, int layers) {
  cost::ModelCost model = whole_number_model(rng, layers);
  for (cost::LayerCost& layer : model.layers) {
    layer.forward_s = 1e-3 * (0.1 + rng.uniform());
    layer.backward_input_s = 1e-3 * (0.1 + rng.uniform());
    layer.backward_weight_s = 1e-3 * (0.1 + rng.uniform());
    layer.update_s = 1e-3 * rng.uniform();
  }
  return model;
}

inline cost::ModelCost scaled(cost::ModelCost model, double factor) {
  for (cost::LayerCost& layer : model.layers) {
    layer.forward_s *= factor;
    layer.backward_input_s *= factor;
    layer.backward_weight_s *= factor;
    layer.update_s *= factor;
  }
  return model;
}

// `layers` equal layers of `seconds` F, I and W each.
inline cost::ModelCost equal_model(int layers, double seconds) {
  cost::ModelCost model;
  for (int i = 0; i < layers; ++i) {
    cost::LayerCost layer;
    layer.name = "layer " + std::to_string(i);
    layer.forward_s = layer.backward_input_s = layer.backward_weight_s = seconds;
    layer.parameter_bytes = Bytes{1000};
    layer.gradient_bytes = Bytes{1000};
    layer.optimizer_bytes = Bytes{2000};
    layer.activation_bytes = Bytes{100};
    model.layers.push_back(layer);
  }
  return model;
}

}  // namespace dynmo::plan
