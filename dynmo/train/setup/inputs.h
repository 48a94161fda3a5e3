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

  // The micro-batches of training; `this` outlives it.
  [[nodiscard]] runtime::Pipeline::Batches training() const {
    return [this](std::int64_t step, MicroBatchId id) { return batches.training(step, id); };
  }
};

// The same training without its sources of dynamism.
[[nodiscard]] TrainOptions dense_of(const TrainOptions& options);

// Requires a valid config. kBadInput: as TokenBatches::open and make_model say.
[[nodiscard]] Expected<Inputs> open_inputs(const TrainOptions& options);

// The same after what can be known before any rank starts: config, names, ranks (of a replica)
// against layers, the checkpoint to resume from. kBadInput.
[[nodiscard]] Expected<Inputs> check_inputs(const TrainOptions& options, int ranks);

// Whether this host has the memory for the states of all layers, as many times as there are
// replicas: to be asked where all ranks run on it. kBadInput.
[[nodiscard]] Expected<void> check_host_memory(const Inputs& inputs, const config::Config& config);

}  // namespace dynmo::train
