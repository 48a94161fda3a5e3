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
#include "dynmo/model/layer.h"
#include "dynmo/plan/plan.h"
#include "dynmo/runtime/staging.h"
#include "dynmo/schedule/schedule.h"
#include "dynmo/schedule/timeline.h"
#include "dynmo/transport/transport.h"

namespace dynmo::runtime {

// The layers a rank owns. Exactly one rank has a layer's state.
using LayerStates = std::map<LayerId, model::LayerState>;

// Inputs and next-token targets of one micro-batch, int64, B sequences of T tokens.
struct MicroBatch {
  at::Tensor tokens_BT;
  at::Tensor targets_BT;
};

// Seconds of one layer for one micro-batch, of its device. A fused B counts as its two halves;
// reading the tokens counts to the first layer's forward, the targets to the last one's.
struct LayerTime {
  double forward_s = 0;
  double input_gradient_s = 0;
  double weight_gradient_s = 0;
};

struct StepInput {
  const schedule::Schedule& lowered;
  const plan::Plan& plan;
  std::int64_t step = 0;
  int frozen_layers =
      0;  // length of the frozen prefix; equals the number of layers for a forward-only schedule
  bool training = true;  // dropout is on
  // Where the schedule is a part of the step (one of several rounds, or replicas): the number of
  // its first micro-batch in the step, and how many the step has (0: those of the schedule).
  int first_micro_batch = 0;
  int step_micro_batches = 0;
  bool meter_stashes = false;                // fill StepOutput::stash_bytes (slower)
  std::vector<std::int64_t> boundary_shape;  // of the hidden tensor between stages
  at::ScalarType boundary_type = at::kFloat;
  Staging staging = {};  // of the states, and of what passes between stages
  // A transport of the same ranks for bytes in the device's memory, whose waits put the device's
  // work in order instead of stopping the host. None: they pass through host memory.
  transport::Transport* device_messages = nullptr;
  // Called with a micro-batch of the step when its first or last stage runs here.
  std::function<MicroBatch(MicroBatchId)> batch;
  // Called when the layer's last weight gradient of the schedule is done. Its time is no layer's,
  // but lies within an action.
  std::function<void(LayerId)> gradient_ready = {};
};

struct StepOutput {
  std::vector<double> losses;  // by micro-batch; empty unless the last stage is here
  std::map<LayerId, std::vector<LayerTime>> layer_times;  // by micro-batch
  std::map<LayerId, Bytes> stash_bytes;                   // of one micro-batch, where metered
  std::vector<schedule::TimedAction> actions;  // compute, in order, since the start of the step
  // Sends and receives, from being posted until this rank saw that they are done: a receive when it
  // needs the message, a send at the end of the step. By the host's clock, also of device_messages.
  std::vector<schedule::TimedAction> messages;
  std::int64_t start_ns = 0;  // steady clock, comparable on one host
  double seconds = 0;         // from start_ns to the end of the last send
  double waiting_s = 0;       // of that, for messages
};

// Runs the actions of transport.rank(). Gradients are added to `states`; the gradient of the loss
// is 1 / (micro-batches of the step) per micro-batch. Tags are those of `lane` (transport/tags.h).
// kPeerLost where a message failed; after an error the states' gradients are unfinished and the
// group is finished.
[[nodiscard]] Expected<StepOutput> run_schedule(transport::Transport& transport, int lane,
                                                const model::Model& model, const StepInput& input,
                                                LayerStates& states);

}  // namespace dynmo::runtime
