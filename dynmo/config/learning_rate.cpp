// SPDX-License-Identifier: Apache-2.0
#include "dynmo/config/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/core/nearest.h"

namespace dynmo::config {

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
  if (!(options.decay_share > 0 && options.decay_share <= 1)) {
    return make_error(ErrorCode::kBadInput,
                      "learning rate: decay_share is {:g}, wanted above 0 and at most 1",
                      options.decay_share);
  }
  return {};
}

Expected<Decay> parse_decay(std::string_view name) {
  if (name == "cosine") return Decay::kCosine;
  if (name == "linear") return Decay::kLinear;
  if (name == "wsd") return Decay::kWsd;
  const std::vector<std::string> known = {"cosine", "linear", "wsd"};
  return make_error(ErrorCode::kBadInput, "'{}' is no way down for a learning rate{}", name,
                    suggestion(name, known));
}

namespace {

// Returns the share of peak - minimum that is left after a share `done` of the steps behind
// warm-up.
double left(const LearningRateOptions& options, double done) {
  switch (options.decay) {
    case Decay::kCosine:
      return 0.5 * (1 + std::cos(std::numbers::pi * done));
    case Decay::kLinear:
      return 1 - done;
    case Decay::kWsd:
      return std::min(1.0, (1 - done) / options.decay_share);
  }
  DYNMO_CHECK(false, "a way down, got {}", static_cast<int>(options.decay));
}

}  // namespace

double learning_rate(const LearningRateOptions& options, std::int64_t step) {
  DYNMO_CHECK(step >= 0, "a step from 0 on, got {}", step);
  if (step < options.warmup_steps) {
    return options.peak * static_cast<double>(step + 1) / static_cast<double>(options.warmup_steps);
  }
  if (step >= options.total_steps) return options.minimum;
  const double done = static_cast<double>(step - options.warmup_steps) /
                      static_cast<double>(options.total_steps - options.warmup_steps);
  return options.minimum + (options.peak - options.minimum) * left(options, done);
}

}  // namespace dynmo::config
