// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/early_exit/options.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

namespace dynmo::dynamism {
namespace {

constexpr std::array<std::string_view, 2> kExitedNames = {"removed", "propagated"};
constexpr std::array<std::string_view, 3> kConfidenceNames = {"gap", "similarity", "classifier"};

}  // namespace

std::vector<SourceKey> keys_of(EarlyExitOptions& o) {
  return {
      {.name = "survivors",
       .field = &o.survivors,
       .allowed = between(1e-6, 1),
       .help = "share of the tokens behind the last exit in the end"},
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
       .help = "steps without exits"},
      {.name = "ramp_steps",
       .field = &o.ramp_steps,
       .allowed = between(1, 1e9),
       .help = "time constant of the log of the survivors behind it"},
      {.name = "confidence",
       .field = toml_choice(&o.confidence, kConfidenceNames),
       .allowed = {},
       .help = "by which a token leaves"},
      {.name = "threshold",
       .field = &o.threshold,
       .allowed = between(0, 1),
       .help = "confidence from which a token leaves; 0: follows survivors; 1: never",
       .used_by = UsedBy::kTraining},
      {.name = "exit_loss",
       .field = &o.exit_loss,
       .allowed = between(0, 10),
       .help = "weight of the loss at an exit of tokens that stay"},
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
       .used_by = UsedBy::kLoad},
  };
}

Expected<void> check(const EarlyExitOptions& options) {
  return check_key_values("early_exit", options);
}

Expected<void> check_training(const EarlyExitOptions& options, const TrainingSetting&) {
  if (options.exited != ExitedTokens::kRemoved) {
    return make_error(
        ErrorCode::kBadInput,
        "early_exit.exited is propagated, wanted removed: a training computes nothing "
        "of tokens that have left");
  }
  if (options.threshold == 0) return {};
  UnusedKeys unused{.names = {"survivors", "ramp_steps"},
                    .cause = fmt::format("early_exit.threshold = {}", options.threshold),
                    .wanted = "early_exit.threshold = 0"};
  if (options.threshold == 1) unused.names.emplace_back("warm_up");
  return check_unused("early_exit", options, unused);
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
