// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys of layer freezing, one table for a training and for a scenario.

#include <cstdint>
#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/source_entry.h"

namespace dynmo::dynamism {

enum class FreezingRule {
  kSchedule,  // a prefix of layers by FreezingSchedule
  // A prefix of layers, each once its gradients have become small (convergence_rule.h).
  kNorm,
  // A prefix of blocks, in a training of layers, each once its outputs stop changing (after
  // Egeria).
  kPlasticity,
  // Blocks anywhere. They skip W but must pass gradients on. So F + I remain, and balancing gains
  // almost nothing.
  kRandom,
};

// The ramp of MosaicML Composer's layer freezing. Nothing freezes until `start`. Then the number
// grows linearly to `fraction` of the layers at `end`, counted from the embedding. `start` and
// `end` are shares of the run's steps. 0 <= start <= end <= 1.
struct FreezingSchedule {
  double start = 0.1;
  double end = 0.7;
  double fraction = 0.7;   // of the layers, frozen from `end` on
  std::int64_t every = 1;  // steps between changes
  friend bool operator==(const FreezingSchedule&, const FreezingSchedule&) = default;
};

// The rules in a load model. A block's plasticity measures how much its activations still move away
// from a reference model's. It falls as exp(-rate x share of the run), front blocks fastest. Every
// `check_every` steps the slope of every block is compared with its first one. A block freezes once
// its slope was below `tolerance` in `patience` checks in a row, and all earlier blocks are frozen.
// Without noise a block freezes at the share ln(1 / tolerance) / rate of the run, plus `patience` -
// 1 checks. The same curve is used for the norms of kNorm. A training measures both
// (convergence_rule.h).
struct FreezingOptions {
  FreezingRule rule = FreezingRule::kSchedule;
  FreezingSchedule schedule = {};
  std::int64_t check_every = 300;  // steps; also those between random freezings
  std::int64_t smooth_steps = 20;  // time constant of the moving average
  double bootstrap = 0.05;         // share of the run before the first check
  double tolerance = 0.2;          // of the first slope, the first norm
  int patience = 3;                // checks
  // Rates of the first and the last block, geometric in between. With the tolerance above, the
  // first block freezes at 16 % of the run. The last one would after its end.
  double front_rate = 10;
  double back_rate = 1.5;
  double rate_spread = 0.1;   // std of the logarithm of a block's rate
  double slope_noise = 0.02;  // std of a smoothed slope, in units of the first one
  // Largest share that freezes under other rules than kSchedule. It is of the blocks, in a training
  // of the layers. kRandom reaches it at the end.
  double max_fraction = 0.75;
  // All layers train again at or below this share of the learning rate at which the first layers
  // froze. 0: never. Egeria uses a tenth.
  double unfreeze_below = 0.1;
};

[[nodiscard]] std::vector<SourceKey> keys_of(FreezingOptions& options);
// Checks the values. Returns kBadInput with a key outside its range, or a start behind the end.
[[nodiscard]] Expected<void> check(const FreezingOptions& options);
[[nodiscard]] Expected<void> check(const FreezingSchedule& schedule);
// Returns kBadInput if a training cannot freeze in this way. Causes are a rule of load models only,
// and kPlasticity with checks in consecutive steps. Emulated layers refuse rules that follow their
// learning.
[[nodiscard]] Expected<void> check_training(const FreezingOptions& options,
                                            const TrainingSetting& setting);
// Returns a reason if changes or checks come too late in the run to freeze anything.
[[nodiscard]] std::optional<Idle> idle_in(const FreezingOptions& options,
                                          const TrainingSetting& setting);

}  // namespace dynmo::dynamism
