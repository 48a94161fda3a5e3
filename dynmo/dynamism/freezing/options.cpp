// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/options.h"

#include <array>
#include <cstddef>

namespace dynmo::dynamism {
namespace {

constexpr std::array<std::string_view, 3> kRuleNames = {"schedule", "plasticity", "random"};

}  // namespace

std::vector<SourceKey> keys_of(FreezingOptions& o) {
  return {
      {.name = "rule",
       .field = toml_choice(&o.rule, kRuleNames),
       .allowed = {},
       .help = "which layers freeze when; a training knows the first"},
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
       .help = "plasticity: steps between checks",
       .used_by = UsedBy::kLoad},
      {.name = "bootstrap",
       .field = &o.bootstrap,
       .allowed = between(0, 1),
       .help = "plasticity: share of the steps before the first check",
       .used_by = UsedBy::kLoad},
      {.name = "tolerance",
       .field = &o.tolerance,
       .allowed = between(0, 1),
       .help = "plasticity: of the first slope, below which a block is still",
       .used_by = UsedBy::kLoad},
      {.name = "patience",
       .field = &o.patience,
       .allowed = between(1, 1e6),
       .help = "plasticity: checks in a row",
       .used_by = UsedBy::kLoad},
      {.name = "front_rate",
       .field = &o.front_rate,
       .allowed = between(1e-6, 1e6),
       .help = "plasticity: rate at which the first block settles",
       .used_by = UsedBy::kLoad},
      {.name = "back_rate",
       .field = &o.back_rate,
       .allowed = between(1e-6, 1e6),
       .help = "... and the last",
       .used_by = UsedBy::kLoad},
      {.name = "rate_spread",
       .field = &o.rate_spread,
       .allowed = between(0, 10),
       .help = "plasticity: std of a block's log rate",
       .used_by = UsedBy::kLoad},
      {.name = "slope_noise",
       .field = &o.slope_noise,
       .allowed = between(0, 10),
       .help = "plasticity: std of a slope",
       .used_by = UsedBy::kLoad},
      {.name = "max_fraction",
       .field = &o.max_fraction,
       .allowed = between(0, 1),
       .help = "plasticity, random: of the blocks that freeze",
       .used_by = UsedBy::kLoad},
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
  if (options.rule != FreezingRule::kSchedule) {
    return make_error(ErrorCode::kBadInput,
                      "freezing.rule is {}, wanted schedule: a training knows no other yet",
                      kRuleNames[static_cast<std::size_t>(options.rule)]);
  }
  if (setting.tied_embeddings) {
    return make_error(ErrorCode::kBadInput,
                      "freezing.enabled is true with tied embeddings: freezing would stop one of "
                      "the two copies; set model.tied_embeddings=false or freezing.enabled=false");
  }
  return {};
}

}  // namespace dynmo::dynamism
