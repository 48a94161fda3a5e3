// SPDX-License-Identifier: Apache-2.0
#pragma once

// Inserts sends and receives into a compute-only schedule.
//
// One ordered channel per (source rank, destination rank, activation | gradient, chunk); a receive
// is posted one compute action ahead of its use, a send right after its value exists and waited for
// lazily. Coarser channels or later receives deadlock or cost up to half the throughput
// (docs/schedules.md).

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

}  // namespace dynmo::schedule
