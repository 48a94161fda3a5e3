// SPDX-License-Identifier: Apache-2.0
#pragma once

// The optimizer's update of a rank's layers, timed. It sends nothing.

#include "dynmo/model/adamw.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/rank_times.h"

namespace dynmo::runtime {

enum class Update { kApply, kSkip };  // kSkip leaves the gradients unused

// Updates every trained layer, with its gradient times `clip_factor`. Does not wait for a device:
// RankTimes::read_update reads the times later.
void update_layers(LayerStates& states, const model::AdamWOptions& optimizer, double clip_factor,
                   Update update, at::Device device, RankTimes& times);

// Reads the times of the newest update if they are not known yet. The host must have waited for the
// device after the update.
void read_update_times(RankTimes& times);

// Measures the update of every trained layer on a copy of the layer. In `states` only the gradients
// change: they become zero.
void measure_updates(LayerStates& states, const model::AdamWOptions& optimizer, at::Device device,
                     RankTimes& times);

}  // namespace dynmo::runtime
