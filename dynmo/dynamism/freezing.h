// SPDX-License-Identifier: Apache-2.0
#pragma once

// Layer freezing as a load model: layers stop training from the front, one after another, and a
// frozen prefix costs its forward pass only.
//
// The ramp is that of MosaicML Composer's layer freezing: nothing until `start`, then linear up to
// `fraction` of the layers at `end`. Egeria (Wang et al., EuroSys'23), AutoFreeze (Liu et al.,
// 2021) and PipeTransformer (He et al., ICML'21) choose the number from the training's state
// instead, but all freeze a prefix too, so the costs below hold for them.

#include <cstdint>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"

namespace dynmo::dynamism {

// `start` and `end` are shares of the run's steps; 0 <= start <= end <= 1.
struct FreezingSchedule {
  double start = 0.5;
  double end = 1;
  double fraction = 1;     // of the layers, frozen from `end` on
  std::int64_t every = 1;  // steps between changes
  friend bool operator==(const FreezingSchedule&, const FreezingSchedule&) = default;
};

// kBadInput naming the field: a share outside [0, 1] or no number, start behind end, every below 1.
[[nodiscard]] Expected<void> validate(const FreezingSchedule& schedule);

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
