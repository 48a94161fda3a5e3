// SPDX-License-Identifier: Apache-2.0
#pragma once

// Early exit: its keys, one table for a training and for a scenario.

#include <cstdint>
#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/source_entry.h"
#include "dynmo/dynamism/source_key.h"

namespace dynmo::dynamism {

// Later layers may treat a token that has left in these ways.
enum class ExitedTokens {
  kRemoved,     // nothing: survivors do not attend to it. Attention's core takes rho^2
  kPropagated,  // its keys and values are computed from its exit state (CALM): K, V in full, the
                // core rho, and messages stay whole, since they carry the exit states
};

// A token may leave by one of these measures of confidence.
enum class ExitConfidence {
  kGap,         // of the two largest probabilities of the exit's head, in fp32
  kSimilarity,  // cosine of the input and the output of the half block before it
  kClassifier,  // a linear one's probability that the exit's head is right
};

struct EarlyExitOptions {
  double survivors = 0.1;       // behind the last exit once the model is sure
  std::int64_t exit_every = 4;  // blocks between exits, none behind the last block. Few, because an
                                // exit has a head of its own (EE-LLM takes two in 32 blocks)
  ExitedTokens exited = ExitedTokens::kRemoved;
  std::int64_t warm_up = 500;  // steps without exits, against training deep layers on hard tokens
  std::int64_t ramp_steps = 2000;  // time constant of log(rho) behind the warm-up
  ExitConfidence confidence = ExitConfidence::kGap;
  double threshold = 0;    // of the confidence, from 1 on no token leaves; 0: follows `survivors`
  double exit_loss = 0.1;  // weight of the loss at an exit of the tokens that stay
  double row_room = 1.0;   // of a message between stages, relative to the rows of the step before
  // Exits differ: std of the logarithm of an exit's hazard, drawn for each, and how much of it
  // drifts in this many steps.
  double exit_spread = 0.3;
  double drift = 0.1;
  std::int64_t drift_steps = 1000;
};

[[nodiscard]] std::vector<SourceKey> keys_of(EarlyExitOptions& options);
// kBadInput naming the key: a value outside its range.
[[nodiscard]] Expected<void> check(const EarlyExitOptions& options);
// kBadInput: tokens that have left are propagated, which no training does.
[[nodiscard]] Expected<void> check_training(const EarlyExitOptions& options,
                                            const TrainingSetting& setting);
// A warm-up as long as the run, or too few blocks for an exit.
[[nodiscard]] std::optional<Idle> idle_in(const EarlyExitOptions& options,
                                          const TrainingSetting& setting);
// Share of the tokens that exit number `exit`, from 1, of `exits` leaves behind it in a step;
// before the first one all are left. What exits of a training aim at, and a load model spreads.
[[nodiscard]] double scheduled_survivors(const EarlyExitOptions& options, std::int64_t step,
                                         int exit, int exits);
[[nodiscard]] bool has_exit(const EarlyExitOptions& options, std::int64_t block,
                            std::int64_t blocks);

}  // namespace dynmo::dynamism
