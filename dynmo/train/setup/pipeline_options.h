// SPDX-License-Identifier: Apache-2.0
#pragma once

// Converts a run to the options of its pipelines.

#include "dynmo/config/config.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/plan/propose.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/setup/resolved_run.h"

namespace dynmo::train {

// Returns the memory of a rank, from pipeline.memory.
[[nodiscard]] Bytes rank_memory(const config::Config& config);

// Returns the allowed orders of ranks in plans, from pipeline.place. They are the same in every
// group, and stay with the controller.
[[nodiscard]] plan::RankOrder rank_order(const config::Config& config);

// Returns the options of a pipeline. Pipelines of one group that run in turn have different lanes.
// `cluster` has a replica's ranks, nodes and links in that group.
[[nodiscard]] runtime::PipelineOptions pipeline_options(const ResolvedRun& run, int lane,
                                                        runtime::Balancing balancing,
                                                        const cost::Cluster& cluster = {});

}  // namespace dynmo::train
