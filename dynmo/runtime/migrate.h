// SPDX-License-Identifier: Apache-2.0
#pragma once

// Moves layers between ranks with their full state: parameters, both moments, masks, step count,
// random key.
//
// A layer is copied, not moved. The source keeps it until every rank has said that its copy is
// complete and its checksum correct. So a failure before that leaves the old plan running.

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
  // The reason if a copy was refused (checksum, header) while every rank is alive.
  std::string refusal = {};
  double seconds = 0;
  Bytes sent;      // by this rank
  Bytes received;  // by this rank
};

// The transfer of one layer from one rank of the group to another.
struct LayerTransfer {
  LayerId layer;
  WorldRank from;
  WorldRank to;
  model::StateShape shape = {};  // of its state at the source
};

// Returns the moves of a plan in every replica. `state` has the shape of each layer, on every rank.
[[nodiscard]] std::vector<LayerTransfer> transfers(const plan::Migration& migration,
                                                   const transport::Axes& axes,
                                                   const RankState& state);

// The use of a copy where it has arrived.
enum class Arrival {
  kTrains,  // for training, on the rank's device
  kStays,   // in host memory, stripped (rank_state.h)
};
// Copies layers. All ranks of the group call it with equal transfers, each with the layers that it
// sends in `from`. `arrived` gets the verified copies, even after an error or refusal. Fails with
// kPeerLost.
[[nodiscard]] Expected<MigrationReport> copy_layers(transport::Transport& group,
                                                    transport::Tag vote_tag,
                                                    const model::Model& model,
                                                    const std::vector<LayerTransfer>& moves,
                                                    const LayerStates& from, LayerStates& arrived,
                                                    Arrival arrival, const Staging& staging = {});

// Moves layers at a step boundary, when gradients are zero and nothing is in flight. All ranks of
// the group call it with equal transfers. All commit, or none does. After a commit the moved layers
// are in the `layers` of their new owners. The old owners also have them until set_aside()
// (rank_state.h) under the new plan.
//
// No error loses a layer, although some ranks may know that all agreed while others do not. The
// source's layer and the verified copy both stay, in `layers` or `spares`. The caller empties the
// spares once all ranks have met again, because then all have committed.
//
// Returns kPeerLost if a rank is lost, which ends the group. Layers travel on
// transport::migration_tag(layer), and votes on `vote_tag`. Messages are bytes in host memory,
// whatever the `staging` of either end.
[[nodiscard]] Expected<MigrationReport> migrate(transport::Transport& group,
                                                transport::Tag vote_tag, const model::Model& model,
                                                const std::vector<LayerTransfer>& moves,
                                                RankState& state, const Staging& staging = {});

}  // namespace dynmo::runtime
