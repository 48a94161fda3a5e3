// SPDX-License-Identifier: Apache-2.0
#pragma once

// The learning rate as a function of the step: linear warm-up, then one of three decays. It is a
// function without state: a resumed run or a new rank needs only the step.

#include <cstdint>
#include <string_view>

#include "dynmo/core/expected.h"

namespace dynmo::config {

enum class Decay {
  kCosine,  // half a cosine (Loshchilov and Hutter, "SGDR", 2017, without restarts)
  kLinear,
  // Warm-up, stable, decay: the peak, then a linear decay at the end (Hu et al., "MiniCPM", 2024).
  kWsd,
};
// Parses "cosine", "linear" or "wsd". Fails with kBadInput.
[[nodiscard]] Expected<Decay> parse_decay(std::string_view name);

struct LearningRateOptions {
  double peak = 3e-4;
  double minimum = 3e-5;
  std::int64_t warmup_steps = 100;
  std::int64_t total_steps = 1000;  // minimum from here on
  Decay decay = Decay::kCosine;
  double decay_share = 0.2;  // kWsd: decaying part of the steps after warm-up
};

// Checks the options. They need 0 <= minimum <= peak, 0 <= warmup_steps <= total_steps, total_steps
// >= 1 and 0 < decay_share <= 1. Returns kBadInput if one does not hold.
[[nodiscard]] Expected<void> validate(const LearningRateOptions& options);

// Returns the learning rate of step 0, 1, .... It is peak x (step + 1) / warmup_steps up to peak at
// step warmup_steps - 1. Then it falls to minimum at total_steps. It is never 0 in the first step.
// Requires step >= 0.
[[nodiscard]] double learning_rate(const LearningRateOptions& options, std::int64_t step);

}  // namespace dynmo::config
