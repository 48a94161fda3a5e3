// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/learning_rate.h"

#include <cmath>
#include <numbers>

#include "dynmo/core/check.h"

namespace dynmo::model {

Expected<void> validate(const LearningRateOptions& options) {
  if (!(std::isfinite(options.peak) && options.minimum >= 0 && options.minimum <= options.peak)) {
    return make_error(ErrorCode::kBadInput,
                      "learning rate: minimum is {:g} and peak {:g}, wanted 0 <= minimum <= peak",
                      options.minimum, options.peak);
  }
  if (options.total_steps < 1 || options.warmup_steps < 0 ||
      options.warmup_steps > options.total_steps) {
    return make_error(ErrorCode::kBadInput,
                      "learning rate: warmup_steps is {} and total_steps {}, wanted 0 <= "
                      "warmup_steps <= total_steps and at least one step",
                      options.warmup_steps, options.total_steps);
  }
  return {};
}

double learning_rate(const LearningRateOptions& options, std::int64_t step) {
  DYNMO_CHECK(step >= 0, "a step from 0 on, got {}", step);
  if (step < options.warmup_steps) {
    return options.peak * static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps);
  }
  if (step >= options.total_steps) return options.minimum;
  const double done = static_cast<double>(step - options.warmup_steps) /
                      static_cast<double>(options.total_steps - options.warmup_steps);
  return options.minimum +
         (options.peak - options.minimum) * 0.5 * (1 + std::cos(std::numbers::pi * done));
}

}  // namespace dynmo::model
