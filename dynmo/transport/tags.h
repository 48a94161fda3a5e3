// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the tags of one group are divided, so that no two uses of a transport can meet on a channel:
//
//   control     agreeing on plans, gathering loads, checkpoint entries
//   migration   one tag a layer that moves
//   reduction   one tag a layer whose gradients are added up over data-parallel replicas, or with
//   those
//               of a tied parameter
//   schedule    activations and gradients: one block of tags a lane, one tag a schedule channel,
//   and
//               one for what its messages have no room for
//
// A lane is one of several runs that share a group. (Replicas share a lane: no message passes
// between two of them on its tags.) Messages of one (source, destination, tag) are ordered; nothing
// orders two tags.

#include "dynmo/core/check.h"
#include "dynmo/core/ids.h"
#include "dynmo/transport/transport.h"

namespace dynmo::transport {

inline constexpr Tag kControlTags = 1 << 11;
inline constexpr Tag kLayerTags = 1 << 19;    // layers a group can have
inline constexpr Tag kChannelTags = 1 << 14;  // of a lane: for half as many schedule channels
inline constexpr Tag kFirstMigrationTag = kControlTags;
inline constexpr Tag kFirstReductionTag = kFirstMigrationTag + kLayerTags;
inline constexpr Tag kFirstScheduleTag = kFirstReductionTag + kLayerTags;
inline constexpr int kLanes = (0x7fffffff - kFirstScheduleTag) / kChannelTags;

// Ranks use these control tags for their exchanges. This is the only list of them: a new exchange
// takes a name here, so that no two can meet.
enum class Control {
  kDevices,  // before a run: who computes where
  kSettings,
  kBarrier,
  kCheckpoint,
  kTraffic,
  kTraces,
  kHosts,     // a group begins: hosts of its ranks, links between them
  kHoldings,  // a group begins: who brings which layers
  kCosts,
  kSize,  // who is in it, and what a rank was asked for between two steps
  kHandover,
  kExchange,  // a pipeline
  kPlan,
  kLoss,
  kVote,
  kSnapshot,
  kSources,
  kPing,
  kUser,  // programs of the user's own, tests, benchmarks
  kCount
};

// The pipelines of one group that run in turn have lanes of their own; all else is in lane 0.
// Requires lane >= 0 and a tag below kControlTags.
[[nodiscard]] constexpr Tag control_tag(Control use, int lane = 0) {
  const int tag = static_cast<int>(Control::kCount) * lane + static_cast<int>(use);
  DYNMO_CHECK(lane >= 0 && tag < kControlTags, "a control tag below {}, got {} of lane {}",
              kControlTags, tag, lane);
  return tag;
}

// Requires 0 <= layer < kLayerTags.
[[nodiscard]] constexpr Tag migration_tag(LayerId layer) {
  DYNMO_CHECK(layer.value >= 0 && layer.value < kLayerTags, "a layer below {}, got {}", kLayerTags,
              layer.value);
  return kFirstMigrationTag + layer.value;
}
[[nodiscard]] constexpr Tag reduction_tag(LayerId layer) {
  return migration_tag(layer) + kLayerTags;
}

// `channel` is that of schedule/lowering.h. Requires 0 <= lane < kLanes, 0 <= channel <
// kChannelTags / 2.
[[nodiscard]] constexpr Tag schedule_tag(int lane, int channel) {
  DYNMO_CHECK(lane >= 0 && lane < kLanes, "a lane below {}, got {}", kLanes, lane);
  DYNMO_CHECK(channel >= 0 && channel < kChannelTags / 2, "a channel below {}, got {}",
              kChannelTags / 2, channel);
  return kFirstScheduleTag + lane * kChannelTags + channel;
}
// The tag of a boundary's second message, where its number of rows varies (runtime/row_messages.h).
[[nodiscard]] constexpr Tag second_message_tag(int lane, int channel) {
  return schedule_tag(lane, channel) + kChannelTags / 2;
}

}  // namespace dynmo::transport
