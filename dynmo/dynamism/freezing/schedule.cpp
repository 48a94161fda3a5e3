// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/schedule.h"

#include <algorithm>
#include <cmath>

#include "dynmo/core/check.h"

namespace dynmo::dynamism {
namespace {

// Returns 0 before `start` and 1 from `end` on.
double ramp(const FreezingSchedule& schedule, double share) {
  if (share >= schedule.end) return 1;
  if (share <= schedule.start) return 0;
  return (share - schedule.start) / (schedule.end - schedule.start);
}

}  // namespace

int frozen_layers(const FreezingSchedule& schedule, std::int64_t step, std::int64_t steps,
                  int layers) {
  DYNMO_CHECK(schedule.every >= 1, "a valid freezing schedule, got every = {}", schedule.every);
  DYNMO_CHECK(step >= 0 && steps >= 1 && layers >= 1,
              "a step of a run and a model, got step {} of {}, {} layers", step, steps, layers);
  const std::int64_t changed = step - step % schedule.every;
  const double share = static_cast<double>(changed) / static_cast<double>(steps);
  // The tolerance keeps 0.29 x 100 = 28.999999999999996 from losing a layer.
  const double wanted = ramp(schedule, share) * schedule.fraction * layers + 1e-9;
  return std::min(static_cast<int>(std::floor(wanted)), layers - 1);
}

cost::ModelCost freeze_prefix(cost::ModelCost model, int layers) {
  DYNMO_CHECK(layers >= 0, "a number of layers, got {}", layers);
  const int count = std::min(layers, std::max(model.size() - 1, 0));
  for (int i = 0; i < count; ++i) {
    cost::LayerCost& layer = model.layers[static_cast<std::size_t>(i)];
    layer.frozen = true;
    layer.backward_input_s = layer.backward_weight_s = layer.update_s = 0;
    layer.gradient_bytes = layer.optimizer_bytes = layer.activation_bytes = Bytes{0};
  }
  return model;
}

}  // namespace dynmo::dynamism
