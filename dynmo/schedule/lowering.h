// SPDX-License-Identifier: Apache-2.0
#pragma once

// Inserts sends and receives into a compute-only schedule.
//
// One ordered channel per (source rank, destination rank, activation | gradient, chunk); a receive
// is posted one compute action ahead of its use, a send right after its value exists and waited for
// lazily. With coarser channels a late message holds up others or deadlocks; with later receives no
// transfer overlaps compute (docs/schedules.md).

#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

// Requires a compute-only schedule of a valid shape. Neighbouring stages on one rank exchange
// nothing.
[[nodiscard]] Schedule lower(const Schedule& compute);

// The channel of a send or receive, the same number at both ends: unique per (stage boundary,
// direction), so no two (rank pair, kind, chunk) share one. Below channel_count(shape).
[[nodiscard]] int channel(const Action& communication);
[[nodiscard]] int channel_count(const PipelineShape& shape);

// The receive that matches a send, the send that matches a receive.
[[nodiscard]] Action peer(const Action& communication);

// Whether `stage` has messages of this kind: the neighbour exists and is on another rank; gradients
// also want both stages trained. False for compute kinds.
[[nodiscard]] bool exchanges(const PipelineShape& shape, ActionKind communication, StageId stage);

// The receive a compute action waits for, and the send of the value it makes, if it has one.
[[nodiscard]] std::optional<Action> receive_for(const PipelineShape& shape, const Action& compute);
[[nodiscard]] std::optional<Action> send_of(const PipelineShape& shape, const Action& compute);

}  // namespace dynmo::schedule
