// SPDX-License-Identifier: Apache-2.0
#pragma once

// The options of a pipeline, which its training run sets. All ranks have equal options, except for
// the device.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "dynmo/c10d/channel_transport.h"
#include "dynmo/config/learning_rate.h"
#include "dynmo/control/policy.h"
#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/adamw.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/tie.h"
#include "dynmo/plan/recompute.h"
#include "dynmo/runtime/micro_batch.h"
#include "dynmo/runtime/staging.h"

namespace dynmo::runtime {

enum class Balancing { kNever, kAutomatic };

// The reaction to a step whose loss or gradient norm is NaN or Inf.
enum class OnNan {
  kStop,  // StepReport::stop has step, layer and rank
  kSkip,  // no update; training continues with the next step
};

struct PipelineOptions {
  std::uint64_t seed = 1;
  // Number of steps of the whole run, for the policy, the sources and the learning rate.
  std::int64_t steps = 0;
  int micro_batches = 1;                     // of one round of the schedule
  int accumulation = 1;                      // rounds of the schedule before an update
  int replicas = 1;                          // pipelines in the group
  std::vector<std::int64_t> boundary_shape;  // {B, T, D} of a micro-batch's hidden tensor
  at::ScalarType boundary_type = at::kFloat;
  // For models whose rows leave (Needs::drops_rows). Size of a stage's first message, relative to
  // the rows that crossed the boundary in the previous step (row_messages.h).
  double row_room = 1;
  std::vector<model::Tie> ties;  // as runtime/ties.h accepts them
  model::AdamWOptions optimizer;
  config::LearningRateOptions learning_rate;
  double clip_norm = 1;  // of the gradients of all trained layers; 0: no clipping
  OnNan on_nan = OnNan::kStop;
  // Makes the sources of dynamism, in their order. If empty, nothing changes.
  dynamism::MakeSources make_sources;
  bool imported = false;  // as in dynamism::Boundary
  // Returns the input of Boundary::probe. It is the same in all groups of a run.
  std::function<MicroBatch()> probed;
  Balancing balancing = Balancing::kAutomatic;
  control::PolicyOptions policy;
  plan::Recompute recompute = plan::Recompute::kNone;
  Bytes memory = cost::kUnlimitedMemory;  // of a rank, for plans and for Recompute::kAuto
  // Ranks of a replica, nodes, links. If it has no ranks, all are equal and on one node.
  cost::Cluster cluster = {};
  int profile_window = 5;  // minimum number of steps, 3 or more
  // Number of steps without layers after which a rank of a replica is released. At least min_ranks
  // ranks stay.
  std::int64_t release_after = 10;
  int min_ranks = 1;
  Staging staging = {};  // where this rank computes
  // Returns the speed of a position's emulated device in a step. Without it, all have 1.
  std::function<double(std::int64_t step, Rank position)> emulated_speed = {};
  c10d::ChannelTransport* channels = nullptr;  // of the group; see StepInput::device_messages
  // Returns whether this rank has something to tell all ranks before the next step
  // (StepReport::asked).
  std::function<bool()> asks = {};
  // Pipelines that share a group in turn have different lanes.
  int lane = 0;
};

}  // namespace dynmo::runtime
