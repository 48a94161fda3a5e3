// SPDX-License-Identifier: Apache-2.0
#pragma once

// The messages that a plan makes its ranks send to each other, in a step and in a migration,
// as the runtime counts them (transport/traffic.h).

#include <span>

#include "dynmo/core/ids.h"
#include "dynmo/core/traffic.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/plan.h"

namespace dynmo::plan {

// A transfer of a layer is cut into messages of at most this size.
inline constexpr Bytes kMaxMessage{std::int64_t{1} << 20};
// A layer that moves also has a header and a digest, each a message.
inline constexpr Bytes kMoveHeader{48};
inline constexpr Bytes kMoveDigest{16};

// Messages of one step of a job of several replicas, whose position p of replica r is world rank
// r x P + p. Between stages on two ranks goes an activation a micro-batch, and a gradient back
// where both stages train. Each of D replicas sums up a D-th of every trained layer's gradients and
// gives the sum to the others, in elements of 4 bytes. Bytes are exact for boundaries that keep all
// their rows and for gradients of one parameter or more; a layer's reduction may take more messages
// than said, as none holds parts of two parameters. Tied parameters and control are left out.
// Requires a valid plan over the layers of `model`, micro_batches and replicas >= 1.
[[nodiscard]] TrafficRows traffic_of(const Plan& plan, const cost::ModelCost& model,
                                     int micro_batches, int replicas = 1);

// Messages of a migration between two plans of `positions` ranks, which every replica carries out.
[[nodiscard]] TrafficRows traffic_of(const Migration& migration, int positions, int replicas = 1);

// The gradients that follow those of a migration which goes on while a step runs; `model` as the
// step has it.
[[nodiscard]] TrafficRows traffic_of_gradients(const Migration& migration,
                                               const cost::ModelCost& model, int positions,
                                               int replicas = 1);

// Messages of copies of all layers, which each rank of the job sends to its keeper as in a
// migration; `keepers` by world rank.
[[nodiscard]] TrafficRows traffic_of_copies(const Plan& plan, const cost::ModelCost& model,
                                            std::span<const WorldRank> keepers);

// The sum of the rows between the nodes of `cluster`, whose ranks are those of the first replica;
// rows to other replicas are left out.
[[nodiscard]] MessageCount between_nodes(const TrafficRows& rows, const cost::Cluster& cluster);

}  // namespace dynmo::plan
