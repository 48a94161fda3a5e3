// SPDX-License-Identifier: Apache-2.0
#pragma once

// The model that a run trains, made from its config, its data's vocabulary and, where it starts
// from other weights, those.

#include <cstdint>
#include <optional>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/tie.h"
#include "dynmo/train/setup/checkpoints.h"
#include "dynmo/train/setup/comparison.h"
#include "dynmo/train/setup/options.h"
#include "dynmo/weights/weights.h"

namespace dynmo::train {

// The layers of a run, which of their parameters are one, and the shape of what passes between
// them.
struct RunModel {
  model::Model layers;
  std::vector<std::int64_t> boundary_shape;
  std::vector<model::Tie> ties = {};
  std::optional<model::DecoderConfig> decoder = {};  // none: emulated, or the user's own model
  std::vector<model::Place> places = {};             // of a decoder's layers
  std::optional<weights::Weights> weights = {};      // to start from
  TrainOptions::RankDevice device = {};              // where they run
  dynamism::MakeSources make_sources = {};           // of the config and the user's own
  GivenCosts given_costs = {};                       // emulated: what the layers sleep for
};

// The layers are shaped by the sources of dynamism that the run has.
// kBadInput naming the key: what no model can be made of, weights that do not fit it, data with
// more tokens than the model's vocabulary. Otherwise the error of options.make_model.
[[nodiscard]] Expected<RunModel> make_model(const TrainOptions& options, std::int64_t vocabulary);

// Hugging Face's names for the decoder of the config, the layer's own for a model of the user's.
[[nodiscard]] TensorName tensor_names(const RunModel& made);

}  // namespace dynmo::train
