// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes compute-only schedules from a shape. They are GPipe (Huang et al. 2019), 1F1B
// (PipeDream-Flush, Narayanan et al. 2021) and interleaved 1F1B (the same). Two split backwards:
// ZB-H1 (Qi et al. 2023) and ZB-V (Qi et al. 2024).
//
// All of them take unequal stages, idle ranks and a frozen prefix, whose stages run F only.
// docs/schedules.md has orders, step times, bubbles and stashes.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/core/ids.h"
#include "dynmo/schedule/schedule.h"

namespace dynmo::schedule {

struct ScheduleOptions {
  // For kInterleaved with several stages a rank. It is the number of micro-batches that pass a
  // rank's first stage before its second gets one. 0 means the number of ranks that hold stages:
  // the minimum, and the usual value.
  int group_size = 0;
};

// Makes the schedule of a kind.
//
// Returns kBadInput, with what would work, if the shape is invalid or does not meet the kind's
// condition. P counts the ranks that hold stages.
//
// - kGpipe, k1F1B, kZbH1: at most one stage a rank.
// - kInterleaved: the stages in a loop over the ranks, the same number on each (loop_placement).
//   With two or more a rank, P <= group size <= M, and M mod group size is 0 or at least P.
// - kZbV: the stages as wave_placement() places two a rank. Any of them may be missing. The middle
//   two, neighbours on one rank, may be one stage.
// - kAdaptive: never, because its order does not follow from a shape alone.
[[nodiscard]] Expected<Schedule> make_schedule(ScheduleKind kind, const PipelineShape& shape,
                                               const ScheduleOptions& options = {});

// Makes a schedule for validation: F of every micro-batch through all stages and nothing else. All
// stages of the result are frozen, so nothing is stashed.
//
// A rank with several stages runs all micro-batches of the first before the second. This fills the
// pipeline once, for any placement. Micro-batch by micro-batch, each would wait for a round trip.
// Returns kBadInput if the shape is invalid.
[[nodiscard]] Expected<Schedule> make_forward_schedule(PipelineShape shape);

// Puts stage s on rank s mod `ranks`, as interleaved 1F1B (Narayanan et al. 2021) does. With
// stages_per_rank = 1 each rank has one stage, as usual. Requires ranks, stages_per_rank >= 1.
// Returns the rank of each stage, numbered along the model.
[[nodiscard]] std::vector<Rank> loop_placement(int ranks, int stages_per_rank);

// Places stages in the order 0, 1, ..., P-1, P-1, ..., 1, 0, 0, 1, ... of ranks. Two stages a rank
// are the V of ZB-V (Qi et al. 2024): rank r holds stages r and 2P-1-r. Requires ranks,
// stages_per_rank >= 1.
[[nodiscard]] std::vector<Rank> wave_placement(int ranks, int stages_per_rank);

}  // namespace dynmo::schedule
