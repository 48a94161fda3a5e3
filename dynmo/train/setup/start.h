// SPDX-License-Identifier: Apache-2.0
#pragma once

// The initial state of a run, equal on all ranks: a checkpoint, or the first plan of a new
// training.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/runtime/rank_state.h"
#include "dynmo/train/setup/checkpoints.h"
#include "dynmo/train/setup/first_plan.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/train/setup/resolved_run.h"
#include "dynmo/transport/grid.h"
#include "dynmo/transport/hosts.h"
#include "dynmo/transport/transport.h"

namespace dynmo::train {

// Checks that all ranks have the same settings. All ranks call it before they train together. Ranks
// that were started separately may have different commands. Then they would wait for each other, or
// train different models. The paths of data and run may differ by host. Returns kBadInput with the
// difference.
[[nodiscard]] Expected<void> check_same_settings(transport::Transport& transport,
                                                 const ResolvedRun& run);

// Lets all ranks compute with the same kernels, since the bits of a training depend on them. All
// ranks call it before they train together. If a device has no kernels of our own, all ranks use
// PyTorch's: run.fused_kernels becomes false. start_lines() say why.
[[nodiscard]] Expected<void> agree_on_kernels(transport::Transport& transport, ResolvedRun& run);

// Returns a line for the user if processors of the ranks differ in what the bits of a training
// depend on, or else "". `own` is kernels::instruction_set_name() of this rank. All ranks call it.
[[nodiscard]] Expected<std::string> unlike_processors(transport::Transport& transport,
                                                      std::string_view own);

struct Start {
  std::optional<Restored> restored;  // none: a new training
  FirstPlan first;
  cost::Cluster cluster;           // a replica's ranks, nodes and links
  std::vector<std::string> notes;  // lines for the user

  [[nodiscard]] std::int64_t step() const { return restored ? restored->step : 0; }
};

// Restores the newest checkpoint that verifies, the same on all ranks of the group, which call it.
// On shared storage some of them may see a new checkpoint later, or fail to read one of its files.
// Then all try again before they give up. Returns kNoCheckpoint, on all ranks, if there is none.
[[nodiscard]] Expected<Restored> restore_the_same(transport::Transport& group,
                                                  const config::Config& config);

// Returns the part of a device's memory that plans may fill. The rest is for the driver's context,
// workspaces of libraries, and gaps between tensors.
[[nodiscard]] Bytes planned_memory(const TrainOptions::RankDevice& device);

// Measures the cluster of a group, in which this rank is on `host`; "": the machine's name. All
// ranks of the group call it. `known` is the cluster of an earlier group.
[[nodiscard]] Expected<transport::MeasuredCluster> measure_group(transport::Transport& group,
                                                                 const ResolvedRun& run,
                                                                 const std::string& host,
                                                                 const cost::Cluster& known = {});

struct Beginning {
  std::string host = {};    // this rank's name in plans; empty: the machine's
  bool resumes = false;     // with the newest checkpoint
  bool after_loss = false;  // a pipeline.cut for another number of ranks does not count
  std::optional<Restored> restored = {};  // a checkpoint that all ranks have restored already
};

// Begins a run. All ranks of its group call it. Restores a checkpoint if the run is resumed.
// Measures layers and makes the first plan, unless the checkpoint's plan can run here.
[[nodiscard]] Expected<Start> begin_run(transport::Transport& group, const ResolvedRun& run,
                                        const Beginning& beginning);

// Returns the states of the layers that the first plan gives to a position. They are restored,
// initial, or have the weights of train.init. Returns kBadInput if a checkpoint or weights do not
// fit.
[[nodiscard]] Expected<runtime::LayerStates> first_states(const Start& start,
                                                          const ResolvedRun& run, Rank position);

// Returns the lines before a run's first step: its device, recomputed layers, its plan.
[[nodiscard]] std::vector<std::string> start_lines(const ResolvedRun& run,
                                                   const transport::Grid& grid,
                                                   const runtime::Pipeline& pipeline);

// Returns the entries of a load trace about the start.
[[nodiscard]] dynamism::RunStart load_trace_start(const FirstPlan& first,
                                                  const config::Config& config);

}  // namespace dynmo::train
