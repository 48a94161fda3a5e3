// SPDX-License-Identifier: Apache-2.0
#pragma once

// Divides the tags of one group, so that no two uses of a transport can meet on a channel:
//
// - control: agreement on plans, gathered loads, checkpoint entries
// - migration: one tag for each layer that moves
// - reduction: one tag for each layer whose gradients are summed over data-parallel replicas, or
//   with those of a tied parameter
// - schedule: activations and gradients. Each lane has a block of tags: one for each schedule
//   channel, and a second one for what its messages have no room for.
//
// A lane is one of several runs that share a group. Replicas share a lane, because no message
// passes between two of them on its tags. Messages of one (source, destination, tag) are ordered.
// Messages of two tags are not.

#include "dynmo/core/check.h"
#include "dynmo/core/ids.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

inline constexpr Tag kControlTags = 1 << 11;
inline constexpr Tag kLayerTags = 1 << 19;  // most layers of a group
// Tags of a lane, for half that number of schedule channels.
inline constexpr Tag kChannelTags = 1 << 14;
inline constexpr Tag kFirstMigrationTag = kControlTags;
inline constexpr Tag kFirstReductionTag = kFirstMigrationTag + kLayerTags;
inline constexpr Tag kFirstScheduleTag = kFirstReductionTag + kLayerTags;
inline constexpr int kLanes = (0x7fffffff - kFirstScheduleTag) / kChannelTags;

// The control tags of all exchanges between ranks. A new exchange adds its name to this list, so
// that no two can meet.
enum class Control {
  kDevices,  // before a run: the device of each rank
  kSettings,
  kBarrier,
  kCheckpoint,
  kTraffic,
  kTraces,
  kHosts,     // a group begins: hosts of its ranks, links between them
  kHoldings,  // a group begins: the layers that each rank brings
  kCosts,
  kSize,  // members of a group, and requests to a rank between two steps
  kHandover,
  kExchange,  // exchange of a pipeline
  kPlan,
  kLoss,
  kVote,
  kSnapshot,
  kSources,
  kPing,
  kClocks,  // a group begins or ends: the clocks of its ranks
  kUser,    // programs of users, tests, benchmarks
  kCount
};

// Returns the tag of an exchange. The pipelines that share a group in turn have lanes of their own.
// Everything else is in lane 0. Requires lane >= 0 and a result below kControlTags.
[[nodiscard]] constexpr Tag control_tag(Control use, int lane = 0) {
  const int tag = static_cast<int>(Control::kCount) * lane + static_cast<int>(use);
  DYNMO_CHECK(lane >= 0 && tag < kControlTags, "a control tag below {}, got {} of lane {}",
              kControlTags, tag, lane);
  return tag;
}

// Returns the tag of a layer. Requires 0 <= layer < kLayerTags.
[[nodiscard]] constexpr Tag migration_tag(LayerId layer) {
  DYNMO_CHECK(layer.value >= 0 && layer.value < kLayerTags, "a layer below {}, got {}", kLayerTags,
              layer.value);
  return kFirstMigrationTag + layer.value;
}
[[nodiscard]] constexpr Tag reduction_tag(LayerId layer) {
  return migration_tag(layer) + kLayerTags;
}

// Returns the tag of a channel of schedule/lowering.h. Requires 0 <= lane < kLanes, 0 <= channel <
// kChannelTags / 2.
[[nodiscard]] constexpr Tag schedule_tag(int lane, int channel) {
  DYNMO_CHECK(lane >= 0 && lane < kLanes, "a lane below {}, got {}", kLanes, lane);
  DYNMO_CHECK(channel >= 0 && channel < kChannelTags / 2, "a channel below {}, got {}",
              kChannelTags / 2, channel);
  return kFirstScheduleTag + lane * kChannelTags + channel;
}
// Returns the tag of a boundary's second message, if its number of rows varies
// (runtime/row_messages.h).
[[nodiscard]] constexpr Tag second_message_tag(int lane, int channel) {
  return schedule_tag(lane, channel) + kChannelTags / 2;
}

}  // namespace dynmo::transport
