// SPDX-License-Identifier: Apache-2.0
#pragma once

// Compute-only schedules from a shape. Orders: GPipe (Huang et al. 2019) and 1F1B (PipeDream-Flush,
// Narayanan et al. 2021). Both take stages that are unequal, idle ranks, and a frozen prefix, whose
// stages run F only.

#include "dynmo/core/expected.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

// kBadInput where the shape is invalid or has more than one stage on a rank (both kinds want at
// most one).
[[nodiscard]] Expected<Schedule> make_schedule(ScheduleKind kind, const PipelineShape& shape);

// F of every micro-batch through all stages and nothing else: for validation. All stages of the
// result are frozen, so nothing is stashed. A rank with several stages runs all micro-batches of
// the first before the second: one fill of the pipeline for any placement, where micro-batch by
// micro-batch would wait for a round trip each. kBadInput where the shape is invalid.
[[nodiscard]] Expected<Schedule> make_forward_schedule(PipelineShape shape);

}  // namespace dynmo::schedule
