// SPDX-License-Identifier: Apache-2.0
#pragma once

// The messages between the ranks of a plan, in a step and in a migration. The runtime counts the
// same messages (transport/traffic.h).

#include <span>

#include "dynmo/core/ids.h"
#include "dynmo/core/traffic.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/plan.h"

namespace dynmo::plan {

// Maximum size of a message of a layer's transfer.
inline constexpr Bytes kMaxMessage{std::int64_t{1} << 20};
// A moving layer also has a header and a digest, one message each.
inline constexpr Bytes kMoveHeader{48};
inline constexpr Bytes kMoveDigest{16};

// Returns the messages of one step of a job with `replicas` replicas. Position p of replica r is
// world rank r x P + p. Between stages on two ranks there is an activation for each micro-batch. A
// gradient returns if both stages train. Each of D replicas sums up a D-th of every trained layer's
// gradients. It sends the sum to the others, in elements of 4 bytes.
//
// Bytes are exact for boundaries that keep all their rows and for gradients of one parameter or
// more. A layer's reduction may take more messages, because no message has parts of two parameters.
// Tied parameters and control are not included. Requires a valid plan over the layers of `model`,
// micro_batches and replicas >= 1.
[[nodiscard]] TrafficRows traffic_of(const Plan& plan, const cost::ModelCost& model,
                                     int micro_batches, int replicas = 1);

// Returns the messages of a migration between two plans of `positions` ranks, in all replicas.
[[nodiscard]] TrafficRows traffic_of(const Migration& migration, int positions, int replicas = 1);

// Returns the messages of the gradients of layers that move during a step. `model` is that of the
// step.
[[nodiscard]] TrafficRows traffic_of_gradients(const Migration& migration,
                                               const cost::ModelCost& model, int positions,
                                               int replicas = 1);

// Returns the messages of copies of all layers. Each rank of the job sends them to its keeper as in
// a migration. `keepers` are by world rank.
[[nodiscard]] TrafficRows traffic_of_copies(const Plan& plan, const cost::ModelCost& model,
                                            std::span<const WorldRank> keepers);

// Returns the sum of the rows between the nodes of `cluster`, whose ranks are those of the first
// replica. Rows to other replicas are not included.
[[nodiscard]] MessageCount between_nodes(const TrafficRows& rows, const cost::Cluster& cluster);

}  // namespace dynmo::plan
