// SPDX-License-Identifier: Apache-2.0
#pragma once

// Early exit: its keys, one table for a training and for a scenario.

#include <cstdint>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/source_key.h"

namespace dynmo::dynamism {

// What later layers do with a token that has left.
enum class ExitedTokens {
  kRemoved,     // nothing: survivors do not attend to it. Attention's core takes rho^2
  kPropagated,  // its keys and values are computed from its exit state (CALM): K, V in full, the
                // core rho, and messages stay whole, since they carry the exit states
};

struct EarlyExitOptions {
  double survivors = 0.1;       // behind the last exit once the model is sure
  std::int64_t exit_every = 4;  // blocks between exits, none behind the last block. Few, because an
                                // exit has a head of its own (EE-LLM takes two in 32 blocks)
  ExitedTokens exited = ExitedTokens::kRemoved;
  std::int64_t warm_up = 500;  // steps without exits, against training deep layers on hard tokens
  std::int64_t ramp_steps = 2000;  // time constant of log(rho) behind the warm-up
  // Exits differ: std of the logarithm of an exit's hazard, drawn for each, and how much of it
  // drifts in this many steps.
  double exit_spread = 0.3;
  double drift = 0.1;
  std::int64_t drift_steps = 1000;
};

[[nodiscard]] std::vector<SourceKey> keys_of(EarlyExitOptions& options);
// kBadInput naming the key: a value outside its range.
[[nodiscard]] Expected<void> check(const EarlyExitOptions& options);

}  // namespace dynmo::dynamism
