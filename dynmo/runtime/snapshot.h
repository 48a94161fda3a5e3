// SPDX-License-Identifier: Apache-2.0
#pragma once

// A snapshot lets a run that has lost a rank go back a few steps in place of to its last
// checkpoint: every rank keeps a copy of its own layers and one of another rank's. It is a
// migration that takes nothing away: the same pieces, digests and vote, between two steps.

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

// For each rank of a group, the one that keeps its copy: as many places further round the group for
// all, so that each keeps one, by the least distance at which most are on another host. `hosts` by
// rank, equal numbers for ranks of one host.
[[nodiscard]] std::vector<WorldRank> keepers(std::span<const int> hosts);

// Called by all ranks of a group between two steps, with equal `keepers`, one a rank. When all have
// a copy they replace the snapshot before by the new one; a refusal leaves it where it was. After
// an error some ranks may have the new one and others not, and both are whole: a rank that has not
// holds its own layers live, and what it keeps for its neighbour in `arriving`.
// kPeerLost where a rank is gone; the group is finished then. The memory of the values and moments
// is there twice more afterwards, three times more while they are copied.
[[nodiscard]] Expected<MigrationReport> take_snapshot(
    const transport::Grid& grid, transport::Tag vote_tag, const model::Model& model,
    std::span<const WorldRank> keepers, const control::Controller& controller, RankState& state,
    const Staging& staging = {});

}  // namespace dynmo::runtime
