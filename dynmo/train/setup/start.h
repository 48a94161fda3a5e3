// SPDX-License-Identifier: Apache-2.0
#pragma once

// The state that a run begins with, alike on all ranks: a checkpoint, or the first plan of a new
// training.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/runtime/rank_state.h"
#include "dynmo/train/setup/checkpoints.h"
#include "dynmo/train/setup/first_plan.h"
#include "dynmo/train/setup/inputs.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/hosts.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

struct Start {
  std::optional<Restored> restored;  // none: a new training
  FirstPlan first;
  cost::Cluster cluster;           // a replica's ranks, nodes and links
  std::vector<std::string> notes;  // lines for people

  [[nodiscard]] std::int64_t step() const { return restored ? restored->step : 0; }
};

// This rank's host, by the name that plans know it by, with its switches where Slurm names them.
[[nodiscard]] transport::Host host_of_rank(const std::string& name);

// Called by all ranks of the first group: restores what is to be resumed; measures layers and makes
// the first plan, unless the checkpoint's can run here.
[[nodiscard]] Expected<Start> begin_run(transport::Transport& group, const TrainOptions& options,
                                        const Inputs& inputs);

// The states of the layers that the first plan gives to a position: restored, initial, or with the
// weights that train.init names.
[[nodiscard]] Expected<runtime::LayerStates> first_states(const Start& start, const Inputs& inputs,
                                                          const config::Config& config,
                                                          Rank position);

// The lines that a run prints before its first step: its device, what is recomputed, its plan.
[[nodiscard]] std::vector<std::string> start_lines(const config::Config& config,
                                                   const Inputs& inputs,
                                                   const transport::Grid& grid,
                                                   const runtime::Pipeline& pipeline);

// The entries of a load trace about the start.
[[nodiscard]] dynamism::RunStart load_trace_start(const FirstPlan& first,
                                                  const config::Config& config);

}  // namespace dynmo::train
