// SPDX-License-Identifier: Apache-2.0
#pragma once

// Compute-only schedules from a shape: GPipe (Huang et al. 2019), 1F1B (PipeDream-Flush, Narayanan
// et al. 2021), interleaved 1F1B (the same), ZB-H1 (Qi et al. 2023) and ZB-V (Qi et al. 2024). All
// take stages that are unequal, idle ranks, and a frozen prefix, whose stages run F only. Orders,
// step times, bubbles and stashes: docs/schedules.md.

#include "dynmo/core/expected.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

struct ScheduleOptions {
  // kInterleaved: micro-batches that pass a rank's first stage before its second gets one; 0: as
  // many as ranks hold stages, the least and the usual.
  int group_size = 0;
};

// Below, P counts the ranks that hold stages. kBadInput, with what would do, where the shape is
// invalid or not what the kind wants:
// - kGpipe, k1F1B, kZbH1: at most one stage a rank.
// - kInterleaved: the stages in a loop over the ranks, as many on each (loop_placement). With two
//   or more a rank: P <= group size <= M, and M divided by it leaves 0 or at least P.
// - kZbV: the stages there and back over the ranks (wave_placement with 2), of which any may be
//   missing, and the two in the middle, neighbours on one rank, may be one.
// - kAdaptive: never, no shape alone gives its order.
[[nodiscard]] Expected<Schedule> make_schedule(ScheduleKind kind, const PipelineShape& shape,
                                               const ScheduleOptions& options = {});

// F of every micro-batch through all stages and nothing else: for validation. All stages of the
// result are frozen, so nothing is stashed. A rank with several stages runs all micro-batches of
// the first before the second: one fill of the pipeline for any placement, where micro-batch by
// micro-batch would wait for a round trip each. kBadInput where the shape is invalid.
[[nodiscard]] Expected<Schedule> make_forward_schedule(PipelineShape shape);

}  // namespace dynmo::schedule
