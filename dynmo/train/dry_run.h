// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a run would be, said without starting it: the first plan, the memory of every rank, the
// predicted time of a step. One process, no rank, no file.

#include <cstdint>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/model/layer.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/config.h"

namespace dynmo::train {

struct DryRun {
  const Config& config;
  const model::Model& layers;
  runtime::PipelineOptions pipeline;  // as for a run
  runtime::Pipeline::Batches batches;
  std::int64_t vocabulary = 0;
  int ranks = 1;  // of a replica
};

// Lines of text. Where costs come from is said in them:
//  - emulated: the profile, or the first step of the trace;
//  - else one layer of each kind (same class, same parameters), run here by itself if that takes
//    less than about 10 s and fits half of the memory that is free;
//  - else the formulas of cost/transformer.h with the cpu preset, float32.
// kInfeasible: no plan.
[[nodiscard]] Expected<std::string> describe(const DryRun& dry_run);

}  // namespace dynmo::train
