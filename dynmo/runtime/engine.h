// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs one rank's part of a lowered schedule on real layers: the counterpart of sim::simulate. It
// knows no schedule by name; what is sent, received and computed when stands in the Schedule.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_sample.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/output_shape.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/micro_batch.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/schedule/schedule.h"
#include "dynmo/schedule/timeline.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

using model::LayerStates;

struct StepInput {
  const schedule::Schedule& lowered;
  const plan::Plan& plan;
  std::int64_t step = 0;
  int frozen_layers =
      0;  // length of the frozen prefix; equals the number of layers for a forward-only schedule
  model::Pass pass = model::Pass::kTraining;
  // Where the schedule is a part of the step (one of several rounds, or replicas): the number of
  // its first micro-batch in the step, and how many the step has (0: those of the schedule).
  int first_micro_batch = 0;
  int step_micro_batches = 0;
  // Fill StepOutput::stash_bytes also of layers whose stash does not know its bytes (slower).
  bool meter_stashes = false;
  std::vector<std::int64_t> boundary_shape;  // of the hidden tensor between stages
  model::OutputShapes output_shapes = {};    // of the step, where layers have shapes of their own
  // For each layer, equal on all ranks: how many rows the first message behind it has room for,
  // where rows may have left (row_messages.h); 0: none have. Empty: so for all layers.
  std::vector<std::int64_t> room = {};
  at::ScalarType boundary_type = at::kFloat;
  Staging staging = {};  // of the states, and of what passes between stages
  // A transport of the same ranks for bytes in the device's memory, whose waits put the device's
  // work in order instead of stopping the host. None: they pass through host memory.
  transport::Transport* device_messages = nullptr;
  // Called with a micro-batch of the step when its first or last stage, or one with a layer that
  // needs targets, runs here.
  std::function<MicroBatch(MicroBatchId)> batch;
  // Called when the layer's last weight gradient of the schedule is done. Its time is no layer's,
  // but lies within an action.
  std::function<void(LayerId)> gradient_ready = {};
  // Called before each action that computes.
  std::function<void()> before_action = {};
};

struct StepOutput {
  std::map<LayerId, std::vector<double>> losses;  // by micro-batch, of layers here that have one
  // The figures of the layers here that have some, added up over the micro-batches in their order;
  // kTraining only.
  std::map<LayerId, std::vector<double>> figures;
  std::map<LayerId, std::vector<cost::LayerTime>> layer_times;  // by micro-batch
  // For each micro-batch, the rows behind layers here with room for rows; kTraining only.
  std::map<LayerId, std::vector<std::int64_t>> rows;
  std::map<LayerId, Bytes> stash_bytes;        // largest of a micro-batch, where known
  std::vector<schedule::TimedAction> actions;  // compute, in order, since the start of the step
  // Sends and receives, from being posted until this rank saw that they are done: a receive when it
  // needs the message, a send at the end of the step. It is the host's clock, also for
  // device_messages.
  std::vector<schedule::TimedAction> messages;
  std::int64_t start_ns = 0;  // steady clock, comparable on one host
  double seconds = 0;         // from start_ns to the end of the last send
  double waiting_s = 0;       // of that, for messages
};

// Runs the actions of transport.rank(). Gradients are added to `states`; every loss weighs 1 /
// (micro-batches of the step). Tags are those of `lane` (transport/tags.h).
// kPeerLost where a message failed; after an error the states' gradients are unfinished and the
// group is finished.
[[nodiscard]] Expected<StepOutput> run_schedule(transport::Transport& transport, int lane,
                                                const model::Model& model, const StepInput& input,
                                                LayerStates& states);

}  // namespace dynmo::runtime
