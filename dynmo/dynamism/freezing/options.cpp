// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "dynmo/dynamism/freezing/convergence_rule.h"

namespace dynmo::dynamism {
namespace {

constexpr std::array<std::string_view, 4> kRuleNames = {"schedule", "norm", "plasticity", "random"};

constexpr std::array<std::string_view, 4> kOfSchedule = {"start", "end", "fraction", "every"};

std::string_view name_of(FreezingRule rule) { return kRuleNames[static_cast<std::size_t>(rule)]; }

// Keys of the other rules.
Expected<void> check_rule(const FreezingOptions& options) {
  const bool schedule = options.rule == FreezingRule::kSchedule;
  UnusedKeys unused{.names = {kOfSchedule.begin(), kOfSchedule.end()},
                    .cause = fmt::format("freezing.rule = {}", name_of(options.rule)),
                    .wanted = "freezing.rule = schedule"};
  if (schedule) {
    FreezingOptions all;
    unused.names.clear();
    for (const SourceKey& key : keys_of(all)) {
      const bool used = key.name == "rule" || std::ranges::count(kOfSchedule, key.name) > 0;
      if (!used) unused.names.push_back(key.name);
    }
    unused.wanted = "freezing.rule = norm or plasticity";
  }
  DYNMO_TRY(check_unused("freezing", options, unused));
  // A slope counts check_every steps at least, so that a shorter time is no time. Where the default
  // is longer, it turns the smoothing off.
  const std::int64_t longest = std::max(options.smooth_steps, FreezingOptions{}.smooth_steps);
  if (options.rule != FreezingRule::kPlasticity || longest > options.check_every) return {};
  return check_unused(
      "freezing", options,
      {.names = {"smooth_steps"},
       .cause = fmt::format("freezing.rule = plasticity and freezing.check_every = {}",
                            options.check_every),
       .wanted = "more than freezing.check_every"});
}

// Something has to freeze before the run ends.
Expected<void> check_time(const FreezingOptions& options, std::int64_t steps) {
  if (options.rule == FreezingRule::kSchedule) {
    const std::int64_t every = options.schedule.every;
    const std::int64_t last = (steps - 1) / every * every;
    const double share = static_cast<double>(last) / static_cast<double>(steps);
    if (every == 1 || share > options.schedule.start || options.schedule.end == 0) return {};
    return make_error(
        ErrorCode::kBadInput,
        "freezing.every is {}: no layer would freeze in {} steps, as the last change "
        "would be before step {} and freezing.start is {}; wanted fewer steps between "
        "changes",
        every, steps, last, options.schedule.start);
  }
  const std::int64_t first = first_check(options, steps);
  // One more of them takes the slopes that others are compared with, and layers freeze a step
  // later.
  const bool slopes = options.rule == FreezingRule::kPlasticity;
  const std::int64_t more = options.patience + (slopes ? 1 : 0);
  if (first + more * options.check_every + (slopes ? 1 : 0) < steps) return {};
  return make_error(ErrorCode::kBadInput,
                    "freezing.check_every is {}: no layer would freeze in {} steps, as the first "
                    "check would be before step {} and {} more are needed (freezing.patience{}); "
                    "wanted fewer steps between checks",
                    options.check_every, steps, first, more, slopes ? " and the first slopes" : "");
}

}  // namespace

std::vector<SourceKey> keys_of(FreezingOptions& o) {
  return {
      {.name = "rule",
       .field = toml_choice(&o.rule, kRuleNames),
       .allowed = {},
       .help = "which layers freeze when; a training knows the first three"},
      {.name = "start",
       .field = &o.schedule.start,
       .allowed = between(0, 1),
       .help = "share of the steps at which the first layers freeze"},
      {.name = "end",
       .field = &o.schedule.end,
       .allowed = between(0, 1),
       .help = "... and the last"},
      {.name = "fraction",
       .field = &o.schedule.fraction,
       .allowed = between(0, 1),
       .help = "of the layers that are frozen then"},
      {.name = "every",
       .field = &o.schedule.every,
       .allowed = at_least(1),
       .help = "steps between changes"},
      {.name = "check_every",
       .field = &o.check_every,
       .allowed = between(1, 1e9),
       .help = "norm, plasticity: steps between checks"},
      {.name = "smooth_steps",
       .field = &o.smooth_steps,
       .allowed = between(1, 1e9),
       .help = "norm, plasticity: time constant of the moving average of a layer's values",
       .used_by = UsedBy::kTraining},
      {.name = "bootstrap",
       .field = &o.bootstrap,
       .allowed = between(0, 1),
       .help = "norm, plasticity: share of the steps before the first check"},
      {.name = "tolerance",
       .field = &o.tolerance,
       .allowed = between(0, 1),
       .help = "norm, plasticity: of the first value, below which a layer has converged"},
      {.name = "patience",
       .field = &o.patience,
       .allowed = between(1, 1e6),
       .help = "norm, plasticity: checks in a row"},
      {.name = "front_rate",
       .field = &o.front_rate,
       .allowed = between(1e-6, 1e6),
       .help = "norm, plasticity: rate at which the first block settles",
       .used_by = UsedBy::kLoad},
      {.name = "back_rate",
       .field = &o.back_rate,
       .allowed = between(1e-6, 1e6),
       .help = "... and the last",
       .used_by = UsedBy::kLoad},
      {.name = "rate_spread",
       .field = &o.rate_spread,
       .allowed = between(0, 10),
       .help = "norm, plasticity: std of a block's log rate",
       .used_by = UsedBy::kLoad},
      {.name = "slope_noise",
       .field = &o.slope_noise,
       .allowed = between(0, 10),
       .help = "norm, plasticity: std of a slope",
       .used_by = UsedBy::kLoad},
      {.name = "max_fraction",
       .field = &o.max_fraction,
       .allowed = between(0, 1),
       .help = "all but schedule: of the layers that freeze"},
      {.name = "unfreeze_below",
       .field = &o.unfreeze_below,
       .allowed = from_below(0, 1),
       .help = "norm, plasticity: share of the learning rate at which layers froze, from which all "
               "train again",
       .used_by = UsedBy::kTraining},
  };
}

Expected<void> check(const FreezingOptions& options) {
  DYNMO_TRY(check_key_values("freezing", options));
  const FreezingSchedule& schedule = options.schedule;
  if (schedule.start <= schedule.end) return {};
  return make_error(ErrorCode::kBadInput,
                    "freezing.start is {}, wanted at most freezing.end, which is {}",
                    schedule.start, schedule.end);
}

Expected<void> check(const FreezingSchedule& schedule) {
  return check(FreezingOptions{.schedule = schedule});
}

Expected<void> check_training(const FreezingOptions& options, const TrainingSetting& setting) {
  if (options.rule == FreezingRule::kRandom) {
    return make_error(ErrorCode::kBadInput,
                      "freezing.rule is random, wanted schedule, norm or plasticity: a training "
                      "knows no other");
  }
  DYNMO_TRY(check_rule(options));
  if (options.rule == FreezingRule::kPlasticity && options.check_every < 2) {
    return make_error(ErrorCode::kBadInput,
                      "freezing.check_every is {} with freezing.rule = plasticity, which compares "
                      "layers with what they were after the step of the check before: wanted 2 or "
                      "more",
                      options.check_every);
  }
  if (setting.steps > 0) DYNMO_TRY(check_time(options, setting.steps));
  if (setting.device == "emulated" && options.rule != FreezingRule::kSchedule) {
    return make_error(ErrorCode::kBadInput,
                      "freezing.rule is {} with run.device = emulated, whose layers have no {}: "
                      "wanted freezing.rule = schedule",
                      name_of(options.rule),
                      options.rule == FreezingRule::kNorm ? "gradients" : "outputs");
  }
  return {};
}

}  // namespace dynmo::dynamism
