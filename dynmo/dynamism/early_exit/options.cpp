// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/early_exit/options.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

#include "dynmo/core/device_names.h"
#include "dynmo/core/effects.h"

namespace dynmo::dynamism {
namespace {

constexpr std::array<std::string_view, 2> kExitedNames = {"removed", "propagated"};
constexpr std::array<std::string_view, 3> kConfidenceNames = {"gap", "similarity", "classifier"};

}  // namespace

std::vector<SourceKey> keys_of(EarlyExitOptions& o) {
  const ActsIf follows = when("threshold", between(0, 0), "early_exit.threshold = 0");
  const ActsIf leaves = when("threshold", from_below(0, 1), "an early_exit.threshold below 1");
  // A head with a loss scores all tokens, for each measure of confidence. The weight of the loss
  // does not change the cost.
  const ActsIf without_loss = when("exit_loss", between(0, 0), "early_exit.exit_loss = 0");
  const ActsIf none = when_so(o.exit_loss == 0, "a load, whose exits have a loss or none",
                              "early_exit.exit_loss = 0");
  return {
      {.name = "survivors",
       .field = &o.survivors,
       .allowed = between(1e-6, 1),
       .help = "share of the tokens behind the last exit in the end",
       .acts_if = {follows}},
      {.name = "exit_every",
       .field = &o.exit_every,
       .allowed = between(1, 1e6),
       .help = "blocks between exits"},
      {.name = "exited",
       .field = toml_choice(&o.exited, kExitedNames),
       .allowed = {},
       .help = "tokens that have left: removed, or propagated as keys and values"},
      {.name = "warm_up",
       .field = &o.warm_up,
       .allowed = between(0, 1e9),
       .help = "steps without exits",
       .acts_if = {leaves}},
      {.name = "ramp_steps",
       .field = &o.ramp_steps,
       .allowed = between(1, 1e9),
       .help = "time constant of the log of the survivors behind it",
       .acts_if = {follows}},
      {.name = "confidence",
       .field = toml_choice(&o.confidence, kConfidenceNames),
       .allowed = {},
       .help = "by which a token leaves",
       .acts_in_load_if = {without_loss}},
      {.name = "threshold",
       .field = &o.threshold,
       .allowed = between(0, 1),
       .help = "confidence from which a token leaves; 0: follows survivors; 1: never",
       .used_by = UsedBy::kTraining},
      {.name = "exit_loss",
       .field = &o.exit_loss,
       .allowed = between(0, 10),
       .help = "weight of the loss at an exit of tokens that stay",
       .acts_in_load_if = {none}},
      {.name = "row_room",
       .field = &o.row_room,
       .allowed = above_to(0, 1e6),
       .help = "room of a message, relative to the rows before",
       .used_by = UsedBy::kTraining},
      {.name = "exit_spread",
       .field = &o.exit_spread,
       .allowed = between(0, 10),
       .help = "std of an exit's log hazard",
       .used_by = UsedBy::kLoad},
      {.name = "drift",
       .field = &o.drift,
       .allowed = between(0, 10),
       .help = "... and of its part that changes",
       .used_by = UsedBy::kLoad},
      {.name = "drift_steps",
       .field = &o.drift_steps,
       .allowed = between(1, 1e9),
       .help = "... wholly after so many steps",
       .used_by = UsedBy::kLoad,
       .acts_if = {when("drift", above(0), "an early_exit.drift above 0")}},
  };
}

Expected<void> check(const EarlyExitOptions& options) {
  return check_key_values("early_exit", options);
}

Expected<void> check_training(const EarlyExitOptions& options, const TrainingSetting& setting) {
  if (setting.head_slices > 1 && is_device_name(setting.device)) {
    return make_error(ErrorCode::kBadInput,
                      "model.head_slices is {} and early_exit.enabled is true with run.device = "
                      "{}: heads of exits are whole there; wanted model.head_slices = 1",
                      setting.head_slices, setting.device);
  }
  if (options.exited != ExitedTokens::kRemoved) {
    return make_error(
        ErrorCode::kBadInput,
        "early_exit.exited is propagated, wanted removed: a training computes nothing "
        "of tokens that have left");
  }
  return {};
}

std::optional<Idle> idle_in(const EarlyExitOptions& options, const TrainingSetting& setting) {
  const bool has_exits = setting.blocks == 0 || options.exit_every < setting.blocks;
  if (has_exits && (options.warm_up < setting.steps || options.threshold == 1)) return {};
  Idle idle{.given = fmt::format("early_exit.warm_up is {}", options.warm_up),
            .nothing = "no token would leave",
            .why = "the run ends before the warm-up",
            .wanted = "a shorter warm-up or more steps"};
  if (!has_exits) {
    idle.given = fmt::format("early_exit.exit_every is {}", options.exit_every);
    idle.why = fmt::format("the last block has no exit and model.blocks is {}", setting.blocks);
    idle.wanted = "fewer blocks between exits";
  }
  return idle;
}

double scheduled_survivors(const EarlyExitOptions& options, std::int64_t step, int exit,
                           int exits) {
  if (step < options.warm_up) return 1;
  const double since =
      static_cast<double>(step - options.warm_up) / static_cast<double>(options.ramp_steps);
  return std::exp(std::log(options.survivors) * (1 - std::exp(-since)) * exit / exits);
}

bool has_exit(const EarlyExitOptions& options, std::int64_t block, std::int64_t blocks) {
  return (block + 1) % options.exit_every == 0 && block + 1 < blocks;
}

}  // namespace dynmo::dynamism
