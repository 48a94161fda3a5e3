// SPDX-License-Identifier: Apache-2.0
#pragma once

// AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2) over
// one layer at a time. Moments and step count are in the LayerState, so they move with it. The
// result does not depend on which layers are updated together.

#include "dynmo/model/layer.h"

namespace dynmo::model {

struct AdamWOptions {
  double learning_rate = 3e-4;  // of this step: see learning_rate.h
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;  // only for parameters with ParameterSpec::weight_decay
};

// Makes one update from the accumulated gradients times `scale` (clip_factor). The same pass zeroes
// the gradients for the next step. Counts state.optimizer_steps. Does nothing for a frozen layer.
void update(LayerState& state, const AdamWOptions& options, double scale = 1);

void zero_gradients(LayerState& state);

// Returns the sum of the squares of all gradients, accumulated in fp64 in one fixed order. So the
// value is the same for every rank, instruction set and thread count. A device adds in an order of
// its own. Returns 0 for a frozen layer.
//
// For the model's norm, add the values of the layers in the order of their ids.
[[nodiscard]] double squared_norm(const LayerState& state);
[[nodiscard]] double squared_norm(const Parameter& parameter);

// Returns the factor that scales gradients of norm `total_norm` to at most `max_norm`. Returns 1 if
// `total_norm` is at most `max_norm`, or if `max_norm` is 0 (no clipping). Returns NaN if the norm
// is NaN: the caller reports a diverged run before it updates.
[[nodiscard]] double clip_factor(double total_norm, double max_norm);

}  // namespace dynmo::model
