// SPDX-License-Identifier: Apache-2.0
#pragma once

// Moves layers between ranks with their full state: parameters, both moments, masks, step count,
// random key. Copy, never move: the source keeps its layer until every rank has said that its copy
// is complete and its checksum right, so a failure before that leaves the old plan running.

#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/plan/migration.h"
#include "dynmo/runtime/rank_state.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

struct MigrationReport {
  bool committed = false;
  // Why not, when every rank is alive but a copy was refused (checksum, header).
  std::string refusal = {};
  double seconds = 0;
  Bytes sent;      // by this rank
  Bytes received;  // by this rank
};

// One layer from one rank of the group to another.
struct LayerTransfer {
  LayerId layer;
  WorldRank from;
  WorldRank to;
  model::StateShape shape = {};  // of its state at the source
};

// The moves of a plan in every replica. `state` says what shape each layer has, on every rank.
[[nodiscard]] std::vector<LayerTransfer> transfers(const plan::Migration& migration,
                                                   const transport::Axes& axes,
                                                   const RankState& state);

// How a copy stays where it has arrived.
enum class Arrival {
  kTrains,  // as a rank trains it, on its device
  kStays,   // in host memory, stripped (rank_state.h)
};
// Called by all ranks of the group with equal transfers, each with the layers that it sends `from`.
// Verified copies are in `arrived`, after an error and a refusal, too.
[[nodiscard]] Expected<MigrationReport> copy_layers(transport::Transport& group,
                                                    transport::Tag vote_tag,
                                                    const model::Model& model,
                                                    const std::vector<LayerTransfer>& moves,
                                                    const LayerStates& from, LayerStates& arrived,
                                                    Arrival arrival, const Staging& staging = {});

// Called by all ranks of the group with equal transfers at a step boundary: gradients are zero,
// nothing is in flight. All commit, or none does: on commit the moved layers are in the `layers` of
// their new owners, and of the old ones until set_aside (rank_state.h) under the new plan.
//
// No error loses a layer, for some ranks may have seen that all agree while others have not: the
// source's layer and the verified copy both stay, in `layers` or `spares`. Who calls it empties the
// spares once all ranks have met again, which proves that all have committed.
//
// kPeerLost where a rank is gone; the group is finished then. Layers travel on
// transport::migration_tag(layer), the verdicts on `vote_tag`. What travels are the bytes in host
// memory, the same whatever `staging` says at either end.
[[nodiscard]] Expected<MigrationReport> migrate(transport::Transport& group,
                                                transport::Tag vote_tag, const model::Model& model,
                                                const std::vector<LayerTransfer>& moves,
                                                RankState& state, const Staging& staging = {});

}  // namespace dynmo::runtime
