// SPDX-License-Identifier: Apache-2.0
#pragma once

// Layer freezing: its keys, one table for a training and for a scenario.

#include <cstdint>
#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/source_entry.h"

namespace dynmo::dynamism {

enum class FreezingRule {
  kSchedule,  // a prefix of layers by FreezingSchedule
  kNorm,      // a prefix of layers, each once its gradients have become small (convergence_rule.h)
  kPlasticity,  // ... of blocks, in a training of layers, each once its outputs have stopped
                // changing (after Egeria)
  kRandom,      // blocks anywhere: they skip W but must pass gradients on, so F + I remain, and
                // balancing has next to nothing to gain
};

// The ramp is that of MosaicML Composer's layer freezing: nothing until `start`, then linear up to
// `fraction` of the layers at `end`, counted from the embedding. `start` and `end` are shares of
// the run's steps; 0 <= start <= end <= 1.
struct FreezingSchedule {
  double start = 0.1;
  double end = 0.7;
  double fraction = 0.7;   // of the layers, frozen from `end` on
  std::int64_t every = 1;  // steps between changes
  friend bool operator==(const FreezingSchedule&, const FreezingSchedule&) = default;
};

// In a load model under kPlasticity a block's plasticity (how much its activations still move away
// from a reference model's) falls as exp(-rate x share of the run), front blocks fastest. Every
// `check_every` steps the slope of every block is compared with its first one. A block freezes once
// it has been below `tolerance` of that in `patience` checks in a row and all blocks before it are
// frozen: without noise at the share ln(1 / tolerance) / rate of the run, and `patience` - 1
// checks. The same curve stands for the norms of kNorm. A training measures both
// (convergence_rule.h).
struct FreezingOptions {
  FreezingRule rule = FreezingRule::kSchedule;
  FreezingSchedule schedule = {};
  std::int64_t check_every = 300;  // steps; also those between random freezings
  std::int64_t smooth_steps = 20;  // time constant of the moving average
  double bootstrap = 0.05;         // share of the run before the first check
  double tolerance = 0.2;          // of the first slope, the first norm
  int patience = 3;                // checks
  // Rates of the first and the last block, geometric in between: with the tolerance above the
  // first freezes at 16 % of the run, the last would after its end.
  double front_rate = 10;
  double back_rate = 1.5;
  double rate_spread = 0.1;   // std of the logarithm of a block's rate
  double slope_noise = 0.02;  // std of a smoothed slope, in units of the first one
  // Largest share that freezes but by kSchedule: of the blocks, in a training of the layers.
  // kRandom reaches it at the end.
  double max_fraction = 0.75;
  // Share of the learning rate at which the first layers froze, at or below which all train again.
  // 0: never. Egeria's is a tenth.
  double unfreeze_below = 0.1;
};

[[nodiscard]] std::vector<SourceKey> keys_of(FreezingOptions& options);
// kBadInput naming the key: a value outside its range, start behind end.
[[nodiscard]] Expected<void> check(const FreezingOptions& options);
[[nodiscard]] Expected<void> check(const FreezingSchedule& schedule);
// kBadInput where a training cannot freeze so: a rule that only load models know, checks of
// kPlasticity without a step between, emulated layers for a rule that follows what they learn.
[[nodiscard]] Expected<void> check_training(const FreezingOptions& options,
                                            const TrainingSetting& setting);
// Changes or checks that come too late in the run to freeze anything.
[[nodiscard]] std::optional<Idle> idle_in(const FreezingOptions& options,
                                          const TrainingSetting& setting);

}  // namespace dynmo::dynamism
