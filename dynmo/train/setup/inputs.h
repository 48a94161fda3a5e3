// SPDX-License-Identifier: Apache-2.0
#pragma once

// The inputs of a run, opened once: its data and its model.

#include "dynmo/core/expected.h"
#include "dynmo/runtime/pipeline.h"
#include "dynmo/train/setup/checkpoints.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/train/setup/run_model.h"
#include "dynmo/train/setup/token_batches.h"

namespace dynmo::train {

struct Inputs {
  TokenBatches batches;
  RunModel model;
  TensorName tensor_name;

  // Returns the micro-batches of training. `this` outlives the result.
  [[nodiscard]] runtime::Pipeline::Batches training() const {
    return [this](std::int64_t step, MicroBatchId id) { return batches.training(step, id); };
  }
};

// Returns the same training without its sources of dynamism.
[[nodiscard]] TrainOptions dense_of(const TrainOptions& options);

// Opens data and model. Returns kBadInput as TokenBatches::open and make_model do. Requires a valid
// config.
[[nodiscard]] Expected<Inputs> open_inputs(const TrainOptions& options);

// Like open_inputs(), and first checks what can be checked before a rank starts. That is the
// config, names, the checkpoint to resume from, and ranks (of a replica) against layers. Returns
// kBadInput.
[[nodiscard]] Expected<Inputs> check_inputs(const TrainOptions& options, int ranks);

// Checks whether this host has the memory for the states of all layers of all replicas. Call it if
// all ranks run on this host. Returns kBadInput.
[[nodiscard]] Expected<void> check_host_memory(const Inputs& inputs, const config::Config& config);

}  // namespace dynmo::train
