// SPDX-License-Identifier: Apache-2.0
#pragma once

// Strong integer ids, so that a rank is never passed for a stage. Use `.value` for arithmetic.

#include <fmt/format.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace dynmo {

template <typename Tag>
struct Id {
  std::int32_t value = 0;

  constexpr Id() = default;
  constexpr explicit Id(std::int32_t id) : value(id) {}
  // Returns the value for indexing. Requires value >= 0.
  [[nodiscard]] constexpr std::size_t index() const { return static_cast<std::size_t>(value); }
  friend constexpr auto operator<=>(Id, Id) = default;
};

// Position of a process in its pipeline, as plans, schedules and the simulator use it.
using Rank = Id<struct RankTag>;
// Number of a process in the group of all processes, replicas included. transport/place.h converts
// between the two (docs/decisions/011-ranks-and-world-ranks.md).
using WorldRank = Id<struct WorldRankTag>;
using StageId = Id<struct StageTag>;  // layers run as one on a rank, numbered along the model
using LayerId = Id<struct LayerTag>;  // smallest unit that can move; global and stable
using MicroBatchId = Id<struct MicroBatchTag>;

// Number of the current group and plan. It grows with every change and is never reused.
using Generation = std::int64_t;

}  // namespace dynmo

template <typename Tag>
struct std::hash<dynmo::Id<Tag>> {
  std::size_t operator()(dynmo::Id<Tag> id) const noexcept {
    return std::hash<std::int32_t>{}(id.value);
  }
};

template <typename Tag>
struct fmt::formatter<dynmo::Id<Tag>> : fmt::formatter<std::int32_t> {
  auto format(dynmo::Id<Tag> id, fmt::format_context& context) const {
    return fmt::formatter<std::int32_t>::format(id.value, context);
  }
};
