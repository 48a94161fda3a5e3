// SPDX-License-Identifier: Apache-2.0
#pragma once

// The options describe the training that a pipeline is part of. Equal on all ranks but for the
// device.

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
  kStop,  // StepReport::stop, which names step, layer and rank
  kSkip,  // no update; training goes on with the next step
};

struct PipelineOptions {
  std::uint64_t seed = 1;
  std::int64_t steps =
      0;  // of the whole run: horizon of the policy and the sources, end of the learning rate
  int micro_batches = 1;                     // of one round of the schedule
  int accumulation = 1;                      // rounds of the schedule before an update
  int replicas = 1;                          // pipelines in the group
  std::vector<std::int64_t> boundary_shape;  // {B, T, D} of a micro-batch's hidden tensor
  at::ScalarType boundary_type = at::kFloat;
  // Where rows leave (Needs::drops_rows): rows that a stage's first message has room for, relative
  // to those that crossed the boundary in the step before (row_messages.h).
  double row_room = 1;
  std::vector<model::Tie> ties;  // as runtime/ties.h accepts them
  model::AdamWOptions optimizer;
  config::LearningRateOptions learning_rate;
  double clip_norm = 1;  // of the gradients of all trained layers; 0: no clipping
  OnNan on_nan = OnNan::kStop;
  dynamism::MakeSources make_sources;  // of dynamism, in their order; none: nothing changes
  bool imported = false;               // dynamism::Boundary's
  std::function<MicroBatch()> probed;  // what Boundary::probe runs: the same in all groups of a run
  Balancing balancing = Balancing::kAutomatic;
  control::PolicyOptions policy;
  plan::Recompute recompute = plan::Recompute::kNone;
  Bytes memory = cost::kUnlimitedMemory;  // of a rank, for plans and for Recompute::kAuto
  cost::Cluster cluster = {};  // ranks of a replica, nodes, links; no ranks: equal, on one node
  int profile_window = 5;      // least steps, 3 or more
  // Steps that a rank of a replica has no layers before it is released, and how many stay.
  std::int64_t release_after = 10;
  int min_ranks = 1;
  Staging staging = {};                        // where this rank computes
  c10d::ChannelTransport* channels = nullptr;  // of the group; see StepInput::device_messages
  // Whether this rank has something to tell all before the next step (StepReport::asked).
  std::function<bool()> asks = {};
  int lane = 0;  // pipelines of one group that run in turn need different ones
};

}  // namespace dynmo::runtime
