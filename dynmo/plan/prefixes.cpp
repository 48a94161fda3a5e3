// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "dynmo/plan/anneal_impl.h"

namespace dynmo::plan::internal {
namespace {

std::int64_t in_parts(double seconds) {
  return std::llround(seconds * 1e9 * (std::int64_t{1} << Prefixes::kPartBits));
}

}  // namespace

Prefixes::Prefixes(const cost::ModelCost& model, Recompute choice)
    : frozen_layers(model.frozen_layers()), recompute(choice) {
  for (auto* sums :
       {&forward, &input_gradient, &weight_gradient, &update, &stash, &state, &again, &saved}) {
    sums->push_back(0);
  }
  const auto add = [](std::vector<std::int64_t>& sums, std::int64_t value) {
    sums.push_back(sums.back() + value);
  };
  for (int i = 0; i < model.size(); ++i) {
    const cost::LayerCost& layer = model.layers[static_cast<std::size_t>(i)];
    const bool runs_back = i >= frozen_layers;
    const bool trains = runs_back && !layer.frozen;
    add(forward, in_parts(layer.forward_s));
    add(input_gradient, runs_back ? in_parts(layer.backward_input_s) : 0);
    add(weight_gradient, trains ? in_parts(layer.backward_weight_s) : 0);
    add(update, trains ? in_parts(layer.update_s) : 0);
    add(stash, runs_back ? layer.activation_bytes.value : 0);
    add(state, cost::state_bytes(layer).value);
    const std::int64_t saves =
        i == 0 ? layer.activation_bytes.value : (layer.activation_bytes - boundary.back()).value;
    const bool twice = runs_back && (choice == Recompute::kWhole  ? i >= 1
                                     : choice == Recompute::kAuto ? saves > 0
                                                                  : false);
    add(again, twice ? in_parts(layer.forward_s) : 0);
    add(saved, twice ? saves : 0);
    boundary.push_back(layer.boundary_bytes);
  }
}

}  // namespace dynmo::plan::internal
