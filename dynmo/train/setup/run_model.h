// SPDX-License-Identifier: Apache-2.0
#pragma once

// The model of a run. It is made from the config, the data's vocabulary and the initial weights, if
// given.

#include <cstdint>
#include <optional>
#include <vector>

#include "dynmo/config/config.h"
#include "dynmo/core/expected.h"
#include "dynmo/cost/layer_cost.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/tie.h"
#include "dynmo/train/setup/checkpoints.h"
#include "dynmo/train/setup/comparison.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/weights/weights.h"

namespace dynmo::train {

// The layers of a run, their common parameters, and the shape of values between them.
struct RunModel {
  model::Model layers;
  std::vector<std::int64_t> boundary_shape;
  std::vector<model::Tie> ties = {};
  std::optional<model::DecoderConfig> decoder = {};  // none: emulated, or the user's model
  std::vector<model::Place> places = {};             // of a decoder's layers
  std::optional<weights::Weights> weights = {};      // initial weights
  dynamism::MakeSources make_sources = {};           // emulated: those of its layers
  // Emulated: the times that the layers sleep for. Updates are real, so their cost is 0 here.
  GivenCosts given_costs = {};
  cost::ModelCost first_costs = {};  // emulated: of the first step, with updates
};

// Makes the model. The layers depend on the run's sources of dynamism. Returns kBadInput with the
// key for an impossible model, or weights or a vocabulary that do not fit it. Else returns the
// error of options.make_model.
[[nodiscard]] Expected<RunModel> make_model(const TrainOptions& options, std::int64_t vocabulary);

// Makes the model of run.device = "emulated", whose layers sleep for given costs. With `dense`, all
// steps have the costs of the trace's first step. Returns kBadInput with file and place if the
// profile or trace cannot be read.
[[nodiscard]] Expected<RunModel> emulated_model(const config::Config& config, bool dense);

// Makes the sources of a run: those of the config, of the user and of the model.
[[nodiscard]] dynamism::MakeSources sources_of(const TrainOptions& options, const RunModel& made);

// Returns Hugging Face's names for the decoder of the config, or the layer's own names for a user's
// model.
[[nodiscard]] TensorName tensor_names(const RunModel& made);

}  // namespace dynmo::train
