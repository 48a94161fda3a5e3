// SPDX-License-Identifier: Apache-2.0
#pragma once

// Moves layers between ranks with their full state: parameters, both moments, step count, random
// key. Copy, never move: the source keeps its layer until every rank has said that its copy is
// complete and its checksum right, so a failure before that leaves the old plan running.

#include <optional>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/model/layer.h"
#include "dynmo/plan/migration.h"
#include "dynmo/runtime/engine.h"
#include "dynmo/runtime/pieces.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

struct MigrationReport {
  bool committed = false;
  std::string
      refusal;  // why not, when every rank is alive but a copy was refused (checksum, header)
  double seconds = 0;
  Bytes sent;      // by this rank
  Bytes received;  // by this rank
};

// Called by all ranks of `voters` with equal `migration` at a step boundary: gradients are zero,
// nothing is in flight. Layers move between the ranks of `pipeline`, which is all of the voters or
// one replica among them (whose ranks follow one another); all replicas commit, or none does. On
// commit the moved layers are in the states of their new owners only. kPeerLost where a rank is
// gone; the group is finished then. Layers travel on transport::migration_tag(layer), the verdicts
// on `vote_tag`. What travels are the bytes in host memory, the same whatever `staging` says at
// either end.
[[nodiscard]] Expected<MigrationReport> migrate(transport::Transport& pipeline,
                                                transport::Transport& voters,
                                                transport::Tag vote_tag, const model::Model& model,
                                                const plan::Migration& migration,
                                                LayerStates& states, int frozen_layers,
                                                const Staging& staging = {});

}  // namespace dynmo::runtime
