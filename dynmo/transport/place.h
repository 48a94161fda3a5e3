// SPDX-License-Identifier: Apache-2.0
#pragma once

// The place of a process in the grid of a group: its replica, and its position in the pipeline
// (docs/decisions/011-ranks-and-world-ranks.md).

#include <compare>

#include "dynmo/core/ids.h"

namespace dynmo::transport {

struct Place {
  int replica = 0;
  Rank position;
  friend auto operator<=>(const Place&, const Place&) = default;
};

// The axes of a group, as a value.
struct Axes {
  int replicas = 1;
  int positions = 1;

  [[nodiscard]] int ranks() const { return replicas * positions; }
  [[nodiscard]] Place place(WorldRank rank) const {
    return {rank.value / positions, Rank(rank.value % positions)};
  }
  [[nodiscard]] WorldRank world_rank(const Place& place) const {
    return WorldRank(place.replica * positions + place.position.value);
  }
};

}  // namespace dynmo::transport
