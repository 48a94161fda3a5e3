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
#include <memory>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"

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

enum class FreezingRule {
  kPlasticity,  // a prefix of blocks, each once it has stopped changing (after Egeria)
  kSchedule,    // a prefix of layers by FreezingSchedule
  kRandom,      // blocks anywhere: they skip W but must pass gradients on, so F + I remain, and
                // balancing has next to nothing to gain
};

// A block's plasticity (how much its activations still move away from a reference model's) falls as
// exp(-rate x share of the run), front blocks fastest. Every `check_every` steps the slope of every
// block is compared with its first one. A block freezes once it has been below `tolerance` of that
// in `patience` checks in a row and all blocks before it are frozen: without noise at the
// share ln(1 / tolerance) / rate of the run, and `patience` - 1 checks.
struct FreezingParameters {
  FreezingRule rule = FreezingRule::kPlasticity;
  std::int64_t check_every = 300;  // steps; also those between random freezings
  double bootstrap = 0.05;         // share of the run before the first check
  double tolerance = 0.2;          // of the first slope
  int patience = 3;                // checks
  // Rates of the first and the last block, geometric in between: with the tolerance above the
  // first freezes at 16 % of the run, the last would after its end.
  double front_rate = 10;
  double back_rate = 1.5;
  double rate_spread = 0.1;   // deviation of the logarithm of a block's rate
  double slope_noise = 0.02;  // deviation of a smoothed slope, in units of the first one
  // Largest share of the blocks frozen; reached at the run's end by kRandom.
  double most = 0.75;
  FreezingSchedule schedule;  // of kSchedule, counted in layers with the embedding
};

// Step at which each block freezes under kPlasticity, never falling with depth; `steps` where it
// does not. A function of (parameters, seed). Requires valid parameters.
[[nodiscard]] std::vector<std::int64_t> freezing_steps(const FreezingParameters& parameters,
                                                       int blocks, std::int64_t steps,
                                                       std::uint64_t seed);

// The embedding freezes with the first block (not under kRandom, so that nothing is a prefix); a
// head tied to it goes on training its own copy. The head never freezes. kBadInput naming the
// field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_freezing(
    const FreezingParameters& parameters, const LoadInputs& inputs);

}  // namespace dynmo::dynamism
