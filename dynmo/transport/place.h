// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where a process is: in its pipeline, and in the group of all
// (docs/decisions/011-positions-and-world-ranks.md).

#include <compare>

#include "dynmo/core/ids.h"

namespace dynmo {

// A process by its place in its pipeline. Plans, schedules and the simulator, which know one
// pipeline, call it its rank.
using Position = Rank;
// A process by its number in the group of all, replicas included.
using WorldRank = Id<struct WorldRankTag>;

}  // namespace dynmo

namespace dynmo::transport {

struct Place {
  int replica = 0;
  Position position;
  friend auto operator<=>(const Place&, const Place&) = default;
};

// The axes of a group, as a value.
struct Axes {
  int replicas = 1;
  int positions = 1;

  [[nodiscard]] int ranks() const { return replicas * positions; }
  [[nodiscard]] Place place(WorldRank rank) const {
    return {rank.value / positions, Position(rank.value % positions)};
  }
  [[nodiscard]] WorldRank world_rank(const Place& place) const {
    return WorldRank(place.replica * positions + place.position.value);
  }
};

}  // namespace dynmo::transport
