// SPDX-License-Identifier: Apache-2.0
#pragma once

// A dry run describes a run without starting it: the first plan, the memory of every rank, the
// predicted time of a step. One process, no rank, no file.

#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/train/setup/options.h"

namespace dynmo::train {

// Lines of text about a run on the ranks of `cluster`, those of a replica; ranks of unlimited
// memory have that of the config. They say where the costs come from:
//  - emulated: the profile, or the first step of the trace;
//  - else one layer of each kind (same class, same parameters), run here by itself if that takes
//    less than about 10 s and fits half of the memory that is free;
//  - else the formulas of cost/transformer.h with the cpu preset, float32.
// kInfeasible: no plan.
[[nodiscard]] Expected<std::string> dry_run(const TrainOptions& options,
                                            const cost::Cluster& cluster);

}  // namespace dynmo::train
