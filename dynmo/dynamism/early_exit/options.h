// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys of early exit, one table for a training and for a scenario.

#include <cstdint>
#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/source_entry.h"
#include "dynmo/dynamism/source_key.h"

namespace dynmo::dynamism {

// The treatment of an exited token in later layers.
enum class ExitedTokens {
  // Removed: survivors do not attend to it. Attention's core costs rho^2.
  kRemoved,
  // Its keys and values are computed from its exit state (CALM). K and V cost the full share, the
  // core costs rho. Messages stay whole, since they carry the exit states.
  kPropagated,
};

// The measure of confidence by which a token leaves.
enum class ExitConfidence {
  kGap,         // of the two largest probabilities of the exit's head, in fp32
  kSimilarity,  // cosine of the input and the output of the half block before it
  kClassifier,  // of a linear classifier: probability that the exit's head is right
};

struct EarlyExitOptions {
  double survivors = 0.1;  // share left behind the last exit of a trained model
  // Blocks between exits, none behind the last block. Exits are few, because each has a head
  // (EE-LLM uses two in 32 blocks).
  std::int64_t exit_every = 4;
  ExitedTokens exited = ExitedTokens::kRemoved;
  std::int64_t warm_up = 500;      // steps without exits, so that deep layers train on hard tokens
  std::int64_t ramp_steps = 2000;  // time constant of log(rho) after the warm-up
  ExitConfidence confidence = ExitConfidence::kGap;
  double threshold = 0;    // of the confidence; from 1 on no token leaves; 0: follows `survivors`
  double exit_loss = 0.1;  // weight of the loss of staying tokens at an exit
  double row_room = 1.0;   // of a message between stages, relative to the rows of the last step
  // Differences between exits. `exit_spread` is the std of the logarithm of an exit's hazard, drawn
  // for each. `drift` is the part of it that drifts in `drift_steps` steps.
  double exit_spread = 0.3;
  double drift = 0.1;
  std::int64_t drift_steps = 1000;
};

[[nodiscard]] std::vector<SourceKey> keys_of(EarlyExitOptions& options);
// Checks the values. Returns kBadInput with a key outside its range.
[[nodiscard]] Expected<void> check(const EarlyExitOptions& options);
// Returns kBadInput for propagated tokens, which no training supports.
[[nodiscard]] Expected<void> check_training(const EarlyExitOptions& options,
                                            const TrainingSetting& setting);
// Returns a reason if the warm-up is as long as the run, or no exit fits between the blocks.
[[nodiscard]] std::optional<Idle> idle_in(const EarlyExitOptions& options,
                                          const TrainingSetting& setting);
// Returns the share of the tokens left behind exit `exit`, counted from 1, of `exits` exits. Before
// the first one all are left. Exits of a training aim at this share, and a load model varies it.
[[nodiscard]] double scheduled_survivors(const EarlyExitOptions& options, std::int64_t step,
                                         int exit, int exits);
[[nodiscard]] bool has_exit(const EarlyExitOptions& options, std::int64_t block,
                            std::int64_t blocks);

}  // namespace dynmo::dynamism
