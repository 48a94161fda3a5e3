// SPDX-License-Identifier: Apache-2.0
#pragma once

// Between a run's config and the options of its pipelines.

#include "dynmo/config/config.h"
#include "dynmo/core/units.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/run_model.h"

namespace dynmo::train {

// The memory of a rank, as pipeline.memory says.
[[nodiscard]] Bytes rank_memory(const config::Config& config);

// Requires a valid config; a pipeline of one group that runs in turn with others has a `lane` of
// its own.
[[nodiscard]] runtime::PipelineOptions pipeline_options(const config::Config& config,
                                                        const RunModel& made, int lane,
                                                        runtime::Balancing balancing);

}  // namespace dynmo::train
