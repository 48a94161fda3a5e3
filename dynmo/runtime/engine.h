// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs one rank's part of a lowered schedule on real layers: the counterpart of sim::simulate(). It
// knows no schedule by name. The Schedule decides what is sent, received and computed, and in which
// order.

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
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

using model::LayerStates;

struct StepInput {
  const schedule::Schedule& lowered;
  const plan::Plan& plan;
  std::int64_t step = 0;
  // Length of the frozen prefix. It is the number of layers for a forward-only schedule.
  int frozen_layers = 0;
  model::Pass pass = model::Pass::kTraining;
  // For a schedule that is only a part of the step (one of several rounds or replicas): the number
  // of its first micro-batch, and the number of micro-batches of the step. The latter is 0 if the
  // schedule has them all.
  int first_micro_batch = 0;
  int step_micro_batches = 0;
  // Fills StepOutput::stash_bytes also for layers whose stash does not know its bytes. This is
  // slower.
  bool meter_stashes = false;
  std::vector<std::int64_t> boundary_shape;  // of the hidden tensor between stages
  // The shapes of this step's boundaries.
  model::OutputShapes output_shapes = {};
  // For each layer, the number of rows for which its first output message has room
  // (row_messages.h), or 0 if no row can have left. An empty list has 0 for all. Equal on all
  // ranks.
  std::vector<std::int64_t> room = {};
  at::ScalarType boundary_type = at::kFloat;
  Staging staging = {};       // of the states and of messages between stages
  double emulated_speed = 1;  // of an emulated device
  // A transport of the same ranks for bytes in the device's memory. Its waits order the device's
  // work without stopping the host. If null, messages pass through host memory.
  transport::Transport* device_messages = nullptr;
  // Returns a micro-batch of the step. Called if this rank runs the first or last stage, or a stage
  // with a layer that needs targets.
  std::function<MicroBatch(MicroBatchId)> batch;
  // Called when the last weight gradient of a layer is done. The time of the call belongs to an
  // action but to no layer.
  std::function<void(LayerId)> gradient_ready = {};
  // Called before each action that computes.
  std::function<void()> before_action = {};
  // Called when all actions were given to the device, before the host waits for it.
  std::function<void()> before_wait = {};
};

struct StepOutput {
  // Losses by micro-batch, for layers here that have one.
  std::map<LayerId, std::vector<double>> losses;
  // The figures of the layers here, summed over the micro-batches in their order. kTraining only.
  std::map<LayerId, std::vector<double>> figures;
  std::map<LayerId, std::vector<cost::LayerTime>> layer_times;  // by micro-batch
  // The rows that leave each layer here, by micro-batch, if StepInput::room has it. kTraining only.
  std::map<LayerId, std::vector<std::int64_t>> rows;
  std::map<LayerId, Bytes> stash_bytes;  // largest of a micro-batch, if known
  // The squared norms of the layers' gradients, if a device has computed them within the step.
  std::map<LayerId, double> squared_norms;
  std::vector<schedule::TimedAction> actions;  // compute, in order, since the start of the step
  // Sends and receives, from posting to the end as this rank saw it. It sees the end of a receive
  // when it needs the message, and of a send at the end of the step. Times are by the host's clock,
  // also for device_messages.
  std::vector<schedule::TimedAction> messages;
  std::int64_t start_ns = 0;  // steady clock, comparable on one host
  double seconds = 0;         // from start_ns to the end of the last send
  double waiting_s = 0;       // part of `seconds` spent waiting for messages
};

// Runs the actions of transport.rank(). Gradients are added to `states`. Every loss weighs 1 /
// (micro-batches of the step). Tags are those of `lane` (transport/tags.h).
//
// Returns kPeerLost if a message failed. After an error the states' gradients are incomplete and
// the group has ended.
[[nodiscard]] Expected<StepOutput> run_schedule(transport::Transport& transport, int lane,
                                                const model::Model& model, const StepInput& input,
                                                LayerStates& states);

// Appends the output of the next round to that of the step. `first` is the number of the round's
// first micro-batch among this replica's.
void append(StepOutput& step, StepOutput round, int first);

}  // namespace dynmo::runtime
