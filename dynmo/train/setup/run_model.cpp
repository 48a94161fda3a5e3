// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/setup/run_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "dynmo/model/precision.h"
#include "dynmo/model/recipe.h"
#include "dynmo/weights/model_config.h"

namespace dynmo::train {
namespace {

dynamism::MakeSources both(dynamism::MakeSources first, dynamism::MakeSources second) {
  if (!second) return first;
  return [first = std::move(first), second = std::move(second)](std::int64_t steps) {
    dynamism::Sources sources = first(steps);
    std::ranges::move(second(steps), std::back_inserter(sources));
    return sources;
  };
}

}  // namespace

Expected<RunModel> make_model(const TrainOptions& options, std::int64_t vocabulary) {
  const config::Config& c = options.config;
  if (emulates(c)) return emulated_model(c, options.dense);
  RunModel made;
  made.boundary_shape = {c.batch.micro_batch_size, c.model.shape.sequence, c.model.shape.hidden};
  const dynamism::MakeSources make_sources = sources_of(options, made);
  const dynamism::Sources sources = make_sources(c.train.steps);
  DYNMO_ASSIGN(const cost::Precision precision, cost::parse_precision(c.model.precision));
  if (options.make_model) {
    if (!c.train.init.empty()) {
      return make_error(ErrorCode::kBadInput,
                        "train.init is '{}', wanted nothing with a model of your own",
                        c.train.init);
    }
    DYNMO_ASSIGN(model::Recipe recipe, options.make_model(c, vocabulary));
    DYNMO_TRY(dynamism::shape(sources, recipe));
    made.layers = model::in_precision(model::layers_of(std::move(recipe)), precision);
    DYNMO_TRY(dynamism::check(sources, {.model = made.layers, .ties = made.ties}));
    return made;
  }
  made.decoder = weights::decoder_config(c, vocabulary);
  if (model::shape_of(*made.decoder).vocabulary < vocabulary) {
    return make_error(ErrorCode::kBadInput,
                      "model.vocabulary is {}, wanted at least the {} tokens of '{}', or 0",
                      c.model.shape.vocabulary, vocabulary, c.data.path);
  }
  DYNMO_TRY(model::validate(*made.decoder));
  model::Recipe recipe = model::make_recipe(*made.decoder);
  DYNMO_TRY(dynamism::shape(sources, recipe));
  made.places = model::places_of(recipe);
  made.layers = model::in_precision(model::layers_of(std::move(recipe)), precision);
  made.ties = model::ties(*made.decoder);
  // The head is the last layer, also if sources have replaced or added layers.
  for (std::size_t i = 0; i < made.ties.size(); ++i) {
    made.ties[i].second = LayerId(static_cast<int>(made.layers.size() - made.ties.size() + i));
  }
  DYNMO_TRY(dynamism::check(sources, {.model = made.layers, .ties = made.ties}));
  if (c.train.init.empty()) return made;
  auto weights = weights::read_weights(c.train.init);
  if (weights) {
    auto same = weights::check_same_decoder(*weights, *made.decoder);
    if (same) same = weights::check_same_experts(*weights, c.sources);
    if (same) same = weights::check_same_layers(*weights, made.places, made.layers);
    if (!same) weights = same.error();
  }
  if (!weights) {
    const bool none = weights.error().code == ErrorCode::kNoCheckpoint;
    return make_error(weights.error().code, "train.init: {}{}", weights.error().message,
                      none ? "; or a folder with config.json and safetensors of Hugging Face" : "");
  }
  made.weights = std::move(*weights);
  return made;
}

dynamism::MakeSources sources_of(const TrainOptions& options, const RunModel& made) {
  return both(both(dynamism::make_sources(options.config.sources), options.make_sources),
              made.make_sources);
}

TensorName tensor_names(const RunModel& made) {
  if (made.decoder) {
    return
        [config = *made.decoder, places = made.places](LayerId layer, std::string_view parameter) {
          return model::checkpoint_name(config, places[layer.index()], parameter);
        };
  }
  return [model = made.layers](LayerId layer, std::string_view parameter) {
    return fmt::format("{}.{}", model[layer.index()]->name(), parameter);
  };
}

}  // namespace dynmo::train
