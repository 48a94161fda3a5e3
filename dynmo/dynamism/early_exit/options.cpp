// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/early_exit/options.h"

#include <array>

namespace dynmo::dynamism {
namespace {

constexpr std::array<std::string_view, 2> kExitedNames = {"removed", "propagated"};

}  // namespace

std::vector<SourceKey> keys_of(EarlyExitOptions& o) {
  return {
      {.name = "survivors",
       .field = &o.survivors,
       .allowed = between(1e-6, 1),
       .help = "share of the tokens behind the last exit in the end",
       .used_by = UsedBy::kLoad},
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
       .help = "time constant of the log of the survivors behind it",
       .used_by = UsedBy::kLoad},
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

}  // namespace dynmo::dynamism
