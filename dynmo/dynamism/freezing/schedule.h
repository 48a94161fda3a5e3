// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which layers a freezing schedule freezes in a step, and what that does to costs: what training
// and load model share.

#include <cstdint>

#include "dynmo/cost/layer_cost.h"
#include "dynmo/dynamism/freezing/options.h"

namespace dynmo::dynamism {

// Layers frozen in step `step` of `steps`: whole layers, rounded down, counted from the embedding
// (layer 0); never the last one, the head. Never decreases with `step`, and changes only at
// multiples of `every`. Requires a valid schedule, 0 <= step, steps >= 1, layers >= 1.
[[nodiscard]] int frozen_layers(const FreezingSchedule& schedule, std::int64_t step,
                                std::int64_t steps, int layers);

// The model with its first `layers` layers frozen (at most all but the last): their I, W, update,
// gradient, optimizer state and stash are gone, the forward pass and the parameters stay. Layers
// frozen before stay frozen. Requires layers >= 0.
[[nodiscard]] cost::ModelCost freeze_prefix(cost::ModelCost model, int layers);

}  // namespace dynmo::dynamism
