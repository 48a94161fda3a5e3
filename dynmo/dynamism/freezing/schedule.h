// SPDX-License-Identifier: Apache-2.0
#pragma once

// The layers that a freezing schedule freezes in a step, and the effect on costs. Training and load
// model share it.

#include <cstdint>

#include "dynmo/cost/layer_cost.h"
#include "dynmo/dynamism/freezing/options.h"

namespace dynmo::dynamism {

// Returns the number of layers frozen in step `step` of `steps`. These are whole layers, rounded
// down, counted from the embedding (layer 0). The last one, the head, never freezes. The number
// never decreases with `step`, and changes only at multiples of `every`. Requires a valid schedule,
// 0 <= step, steps >= 1, layers >= 1.
[[nodiscard]] int frozen_layers(const FreezingSchedule& schedule, std::int64_t step,
                                std::int64_t steps, int layers);

// Returns the model with its first `layers` layers frozen (at most all but the last). Their I, W,
// update, gradient, optimizer state and stash are 0. The forward pass and the parameters stay.
// Layers frozen before stay frozen. Requires layers >= 0.
[[nodiscard]] cost::ModelCost freeze_prefix(cost::ModelCost model, int layers);

}  // namespace dynmo::dynamism
