// SPDX-License-Identifier: Apache-2.0
#pragma once

// Takes snapshots, so that a run that has lost a rank returns a few steps instead of to its last
// checkpoint. Every rank keeps a copy of its own layers and of another rank's. A snapshot is a
// migration that takes nothing away. It uses the same pieces, digests and vote, between two steps.

#include <span>
#include <vector>

#include "dynmo/control/controller.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/model/layer.h"
#include "dynmo/runtime/migrate.h"
#include "dynmo/runtime/rank_state.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// Returns the rank that keeps each rank's copy. All keepers are at the same distance around the
// group, so each rank keeps one copy. It is the distance with most keepers on another host, the
// shortest among equals. `hosts` has a number for each rank, equal on one host.
[[nodiscard]] std::vector<WorldRank> keepers(std::span<const int> hosts);

// Takes a snapshot between two steps. All ranks of a group call it with equal `keepers`, one for
// each rank. The new snapshot replaces the previous one when all ranks have their copies. If a copy
// is refused, the previous one stays.
//
// After an error some ranks may have only the new snapshot and others only the old. Both are whole.
// A rank with the old one still holds its own layers live, and its neighbour's in `arriving`.
//
// Returns kPeerLost if a rank is lost, which ends the group. A snapshot takes twice the memory of
// values and moments, and three times that while it is taken.
//
// On a device with Staging::beside the host waits once, for one copy of the layers. This pinned
// copy is the snapshot. Another one's memory stays for the next snapshot.
[[nodiscard]] Expected<MigrationReport> take_snapshot(
    const transport::Grid& grid, transport::Tag vote_tag, const model::Model& model,
    std::span<const WorldRank> keepers, const control::Controller& controller, RankState& state,
    const Staging& staging = {});

}  // namespace dynmo::runtime
