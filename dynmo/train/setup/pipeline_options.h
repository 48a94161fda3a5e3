// SPDX-License-Identifier: Apache-2.0
#pragma once

// Between a run's config and the options of its pipelines.

#include "dynmo/config/config.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/plan/propose.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/setup/run_model.h"

namespace dynmo::train {

// The memory of a rank, as pipeline.memory says.
[[nodiscard]] Bytes rank_memory(const config::Config& config);

// The order in which plans may put ranks, as pipeline.place says. (The same in every group: it
// stays with the controller.)
[[nodiscard]] plan::RankOrder rank_order(const config::Config& config);

// Requires a valid config; a pipeline of one group that runs in turn with others has a `lane` of
// its own. `cluster`: a replica's ranks, nodes and links in that group.
[[nodiscard]] runtime::PipelineOptions pipeline_options(const config::Config& config,
                                                        const RunModel& made, int lane,
                                                        runtime::Balancing balancing,
                                                        const cost::Cluster& cluster = {});

}  // namespace dynmo::train
