// SPDX-License-Identifier: Apache-2.0
#pragma once

// Inserts sends and receives into a compute-only schedule.
//
// There is one ordered channel per (source rank, destination rank, activation | gradient, chunk). A
// receive is posted one compute action ahead of its use. A send is posted right after its value
// exists and waited for lazily.
//
// With coarser channels a late message delays others or deadlocks. With later receives no transfer
// overlaps compute (docs/schedules.md).

#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

// Returns the lowered schedule. Neighbouring stages on one rank exchange nothing. Requires a
// compute-only schedule of a valid shape.
[[nodiscard]] Schedule lower(const Schedule& compute);

// Returns the channel of a send or receive, below channel_count(shape). Both ends have the same
// number. It is unique per (stage boundary, direction), so no two (rank pair, kind, chunk) share
// one.
[[nodiscard]] int channel(const Action& communication);
[[nodiscard]] int channel_count(const PipelineShape& shape);

// Returns the receive that matches a send, or the send that matches a receive.
[[nodiscard]] Action peer(const Action& communication);

// Returns whether `stage` has messages of this kind. They exist if the neighbour exists on another
// rank and, for gradients, both stages are trained. Returns false for compute kinds.
[[nodiscard]] bool exchanges(const PipelineShape& shape, ActionKind communication, StageId stage);

// Returns the receive that a compute action waits for, or nullopt if there is none.
[[nodiscard]] std::optional<Action> receive_for(const PipelineShape& shape, const Action& compute);
// Returns the send of the value that a compute action makes, or nullopt if there is none.
[[nodiscard]] std::optional<Action> send_of(const PipelineShape& shape, const Action& compute);

}  // namespace dynmo::schedule
