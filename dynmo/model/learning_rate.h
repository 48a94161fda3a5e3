// SPDX-License-Identifier: Apache-2.0
#pragma once

// The learning rate as a function of the step: linear warm-up, then half a cosine (Loshchilov and
// Hutter, "SGDR", 2017, without restarts). A function, not an object with a state: a resumed run or
// a new rank needs nothing but the step.

#include <cstdint>

#include "dynmo/core/expected.h"

namespace dynmo::model {

struct LearningRateOptions {
  double peak = 3e-4;
  double minimum = 3e-5;
  std::int64_t warmup_steps = 100;
  std::int64_t total_steps = 1000;  // minimum from here on
};

// kBadInput unless 0 <= minimum <= peak, 0 <= warmup_steps <= total_steps, total_steps >= 1.
[[nodiscard]] Expected<void> validate(const LearningRateOptions& options);

// Of step 0, 1, ...: peak x (step + 1) / warmup_steps up to peak at step warmup_steps - 1, then
// down to minimum at total_steps. Never 0 in the first step. Requires step >= 0.
[[nodiscard]] double learning_rate(const LearningRateOptions& options, std::int64_t step);

}  // namespace dynmo::model
