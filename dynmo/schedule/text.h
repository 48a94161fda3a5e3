// SPDX-License-Identifier: Apache-2.0
#pragma once

// Actions and schedules as text. An action is stage, kind, micro-batch, spelled as PyTorch's
// pipelining spells it: `2F0`, `2B0`, `2I0`, `2W0`, `1SEND_F0`, `1RECV_F0`, `1SEND_B0`, `1RECV_B0`.

#include <span>
#include <string>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

[[nodiscard]] std::string_view name(ActionKind kind);  // "F", "B", "I", "W", "SEND_F", ...
[[nodiscard]] std::string to_string(const Action& action);

// kBadInput: not of the form above, an unknown kind, a number that does not fit.
[[nodiscard]] Expected<Action> parse_action(std::string_view text);

// A place in a schedule: the `index`-th action of a rank.
struct Position {
  Rank rank;
  int index = 0;
  friend bool operator==(const Position&, const Position&) = default;
};

struct GridOptions {
  std::span<const Position> marked;  // printed as >2F0<
  // Actions shown on either side of a rank's marks, "..." for the rest; negative: all of them.
  int context = -1;
};

// One line a rank, its actions in order in aligned columns; a rank without actions says "idle".
// Columns are positions in the lists, not times. Every line ends with a newline.
[[nodiscard]] std::string to_grid(const Schedule& schedule, const GridOptions& options = {});

}  // namespace dynmo::schedule
