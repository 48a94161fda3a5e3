// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

#include "dynmo/core/effects.h"
#include "dynmo/dynamism/freezing/convergence_rule.h"
#include "dynmo/dynamism/freezing/schedule.h"

namespace dynmo::dynamism {
namespace {

constexpr std::array<std::string_view, 4> kRuleNames = {"schedule", "norm", "plasticity", "random"};

constexpr std::int64_t kManyLayers = 1 << 20;

std::string_view name_of(FreezingRule rule) { return kRuleNames[static_cast<std::size_t>(rule)]; }

}  // namespace

std::vector<SourceKey> keys_of(FreezingOptions& o) {
  const ActsIf by_schedule = when("rule", Names{"schedule"});
  const ActsIf converges = when("rule", Names{"norm", "plasticity"});
  const ActsIf not_by_schedule = when("rule", Names{"norm", "plasticity", "random"});
  // A slope counts at least check_every steps, so a shorter time has no effect. If the default is
  // longer, it disables the smoothing.
  const std::int64_t longest = std::max(o.smooth_steps, FreezingOptions{}.smooth_steps);
  const ActsIf smooths = when_so(
      o.rule != FreezingRule::kPlasticity || longest > o.check_every,
      fmt::format("freezing.rule = plasticity and freezing.check_every = {}", o.check_every),
      "more than freezing.check_every");
  return {
      {.name = "rule",
       .field = toml_choice(&o.rule, kRuleNames),
       .allowed = {},
       .help = "which layers freeze when; a training knows the first three"},
      {.name = "start",
       .field = &o.schedule.start,
       .allowed = between(0, 1),
       .help = "share of the steps at which the first layers freeze",
       .acts_if = {by_schedule}},
      {.name = "end",
       .field = &o.schedule.end,
       .allowed = between(0, 1),
       .help = "... and the last",
       .acts_if = {by_schedule}},
      {.name = "fraction",
       .field = &o.schedule.fraction,
       .allowed = between(0, 1),
       .help = "of the layers that are frozen then",
       .acts_if = {by_schedule}},
      {.name = "every",
       .field = &o.schedule.every,
       .allowed = at_least(1),
       .help = "steps between changes",
       .acts_if = {by_schedule}},
      {.name = "check_every",
       .field = &o.check_every,
       .allowed = between(1, 1e9),
       .help = "steps between checks",
       .acts_if = {not_by_schedule}},
      {.name = "smooth_steps",
       .field = &o.smooth_steps,
       .allowed = between(1, 1e9),
       .help = "time constant of the moving average of a layer's values",
       .used_by = UsedBy::kTraining,
       .acts_if = {converges, smooths}},
      {.name = "bootstrap",
       .field = &o.bootstrap,
       .allowed = between(0, 1),
       .help = "share of the steps before the first check",
       .acts_if = {converges}},
      {.name = "tolerance",
       .field = &o.tolerance,
       .allowed = between(0, 1),
       .help = "of the first value, below which a layer has converged",
       .acts_if = {converges}},
      {.name = "patience",
       .field = &o.patience,
       .allowed = between(1, 1e6),
       .help = "checks in a row",
       .acts_if = {converges}},
      {.name = "front_rate",
       .field = &o.front_rate,
       .allowed = between(1e-6, 1e6),
       .help = "rate at which the first block settles",
       .used_by = UsedBy::kLoad,
       .acts_if = {converges}},
      {.name = "back_rate",
       .field = &o.back_rate,
       .allowed = between(1e-6, 1e6),
       .help = "... and the last",
       .used_by = UsedBy::kLoad,
       .acts_if = {converges}},
      {.name = "rate_spread",
       .field = &o.rate_spread,
       .allowed = between(0, 10),
       .help = "std of a block's log rate",
       .used_by = UsedBy::kLoad,
       .acts_if = {converges}},
      {.name = "slope_noise",
       .field = &o.slope_noise,
       .allowed = between(0, 10),
       .help = "std of a slope",
       .used_by = UsedBy::kLoad,
       .acts_if = {converges}},
      {.name = "max_fraction",
       .field = &o.max_fraction,
       .allowed = between(0, 1),
       .help = "of the layers that freeze",
       .acts_if = {not_by_schedule}},
      {.name = "unfreeze_below",
       .field = &o.unfreeze_below,
       .allowed = from_below(0, 1),
       .help = "share of the learning rate at which layers froze, from which all "
               "train again",
       .used_by = UsedBy::kTraining,
       .acts_if = {converges}},
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
  if (options.rule == FreezingRule::kPlasticity && options.check_every < 2) {
    return make_error(ErrorCode::kBadInput,
                      "freezing.check_every is {} with freezing.rule = plasticity, which compares "
                      "layers with what they were after the step of the check before: wanted 2 or "
                      "more",
                      options.check_every);
  }
  if (setting.device == "emulated" && options.rule != FreezingRule::kSchedule) {
    return make_error(ErrorCode::kBadInput,
                      "freezing.rule is {} with run.device = emulated, whose layers have no {}: "
                      "wanted freezing.rule = schedule",
                      name_of(options.rule),
                      options.rule == FreezingRule::kNorm ? "gradients" : "outputs");
  }
  return {};
}

std::optional<Idle> idle_in(const FreezingOptions& options, const TrainingSetting& setting) {
  const std::int64_t steps = setting.steps;
  constexpr std::string_view kNothing = "no layer would freeze";
  if (options.rule == FreezingRule::kSchedule) {
    const FreezingSchedule& schedule = options.schedule;
    const auto layers = static_cast<int>(setting.blocks > 0 ? 2 * setting.blocks + 2 : kManyLayers);
    if (frozen_layers(schedule, steps - 1, steps, layers) > 0) return {};
    const std::int64_t last = (steps - 1) / schedule.every * schedule.every;
    if (schedule.every > 1 &&
        static_cast<double>(last) <= schedule.start * static_cast<double>(steps)) {
      return Idle{
          .given = fmt::format("freezing.every is {}", schedule.every),
          .nothing = kNothing,
          .why = fmt::format("the last change would be before step {} and freezing.start is {}",
                             last, schedule.start),
          .wanted = "fewer steps between changes"};
    }
    if (schedule.fraction * layers < 1) {
      return Idle{.given = fmt::format("freezing.fraction is {}", schedule.fraction),
                  .nothing = kNothing,
                  .why = "that is less than a layer of the model",
                  .wanted = "a larger share"};
    }
    return Idle{
        .given = fmt::format("freezing.start is {}", schedule.start),
        .nothing = kNothing,
        .why = fmt::format("the first would be due at the end of the run or behind it, with "
                           "freezing.end = {}",
                           schedule.end),
        .wanted = "an earlier start"};
  }
  if (options.rule == FreezingRule::kRandom) return {};
  if (options.tolerance == 0) {
    return Idle{.given = "freezing.tolerance is 0",
                .nothing = kNothing,
                .why = "every measure is above it",
                .wanted = "a larger number"};
  }
  const std::int64_t layers = setting.blocks > 0 ? 2 * setting.blocks + 2 : kManyLayers;
  if (max_frozen(options, static_cast<std::size_t>(layers)) == 0) {
    return Idle{.given = fmt::format("freezing.max_fraction is {}", options.max_fraction),
                .nothing = kNothing,
                .why = "that is less than a layer of the model",
                .wanted = "a larger share"};
  }
  const std::int64_t first = first_check(options, steps);
  // With kPlasticity one more check takes the slopes to compare with, and layers freeze a step
  // later.
  const bool slopes = options.rule == FreezingRule::kPlasticity;
  const std::int64_t more = options.patience + (slopes ? 1 : 0);
  const std::int64_t after_first = more * options.check_every + (slopes ? 1 : 0);
  if (first + after_first < steps) return {};
  if (options.check_every + after_first < steps) {
    return Idle{.given = fmt::format("freezing.bootstrap is {}", options.bootstrap),
                .nothing = kNothing,
                .why = fmt::format("the first check would be before step {}", first),
                .wanted = "a smaller share"};
  }
  return Idle{.given = fmt::format("freezing.check_every is {}", options.check_every),
              .nothing = kNothing,
              .why = fmt::format("the first check would be before step {} and {} more are needed "
                                 "(freezing.patience{})",
                                 first, more, slopes ? " and the first slopes" : ""),
              .wanted = "fewer steps between checks"};
}

}  // namespace dynmo::dynamism
