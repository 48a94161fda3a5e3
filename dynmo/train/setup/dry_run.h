// SPDX-License-Identifier: Apache-2.0
#pragma once

// A dry run describes a run without starting it: first plan, memory of every rank, predicted time
// of a step. It is one process without ranks or files.

#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/train/setup/resolved_run.h"

namespace dynmo::train {

// Returns lines of text about a run on the ranks of `cluster`, those of a replica. Ranks of
// unlimited memory get that of the config. The text names the source of the costs:
// - emulated: the profile, or the first step of the trace;
// - else one layer of each kind (same class and parameters), measured here. That must take less
//   than about 10 s and fit half of the free memory;
// - else the formulas of cost/transformer.h with the cpu preset, float32.
//
// Returns kInfeasible if there is no plan.
[[nodiscard]] Expected<std::string> dry_run(const ValidOptions& valid,
                                            const cost::Cluster& cluster);

}  // namespace dynmo::train
