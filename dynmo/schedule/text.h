// SPDX-License-Identifier: Apache-2.0
#pragma once

// Actions and schedules as text. An action is stage, kind and micro-batch, spelled as PyTorch's
// pipelining spells it. Examples are `2F0`, `2B0`, `2I0`, `2W0`, `1SEND_F0`, `1RECV_F0`,
// `1SEND_B0`, `1RECV_B0`.

#include <span>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

[[nodiscard]] std::string_view name(ActionKind kind);  // "F", "B", "I", "W", "SEND_F", ...
[[nodiscard]] std::string to_string(const Action& action);

// Reads an action. Returns kBadInput for another form, an unknown kind or a number that does not
// fit.
[[nodiscard]] Expected<Action> parse_action(std::string_view text);

// A position in a schedule: the `index`-th action of a rank.
struct Position {
  Rank rank;
  int index = 0;
  friend bool operator==(const Position&, const Position&) = default;
};

struct GridOptions {
  std::span<const Position> marked;  // printed as >2F0<
  // Number of actions shown on either side of a rank's marks, with "..." for the rest. A negative
  // number shows all actions.
  int context = -1;
};

// Returns a line for each rank, with actions in aligned columns. A rank without actions has the
// line "idle". Columns are positions in the lists, not times. Every line ends with a newline.
[[nodiscard]] std::string to_grid(const Schedule& schedule, const GridOptions& options = {});

}  // namespace dynmo::schedule
