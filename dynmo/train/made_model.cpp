// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/made_model.h"

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

#include "dynmo/model/precision.h"
#include "dynmo/train/emulation.h"
#include "dynmo/train/model_config.h"

namespace dynmo::train {

Expected<MadeModel> make_model(const TrainOptions& options, std::int64_t vocabulary) {
  const Config& c = options.config;
  if (emulates(c)) {
    DYNMO_ASSIGN(EmulatedModel emulated, emulated_model(c));
    return MadeModel{.layers = std::move(emulated.layers),
                     .boundary_shape = std::move(emulated.boundary_shape)};
  }
  MadeModel made{.layers = {},
                 .boundary_shape = {c.batch.micro_batch_size, c.model.sequence, c.model.hidden},
                 .device = options.rank_device};
  DYNMO_ASSIGN(const model::Precision precision, model::parse_precision(c.model.precision));
  if (options.make_model) {
    if (!c.train.init.empty()) {
      return make_error(ErrorCode::kBadInput,
                        "train.init is '{}', wanted nothing with a model of your own",
                        c.train.init);
    }
    DYNMO_ASSIGN(made.layers, options.make_model(c, vocabulary));
    made.layers = model::in_precision(std::move(made.layers), precision);
    return made;
  }
  made.decoder = decoder_config(c, vocabulary);
  if (model::sizes(*made.decoder).vocabulary < vocabulary) {
    return make_error(ErrorCode::kBadInput,
                      "model.vocabulary is {}, wanted at least the {} tokens of '{}', or 0",
                      c.model.vocabulary, vocabulary, c.data.path);
  }
  DYNMO_TRY(model::validate(*made.decoder));
  made.layers = model::in_precision(model::make_decoder(*made.decoder), precision);
  made.ties = model::ties(*made.decoder);
  if (c.freezing.enabled && !made.ties.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "freezing.enabled is true with tied embeddings: freezing would stop one of "
                      "the two copies; set model.tied_embeddings=false or freezing.enabled=false");
  }
  if (c.train.init.empty()) return made;
  auto weights = read_weights(c.train.init);
  if (weights) {
    const auto same = check_same_decoder(*weights, *made.decoder);
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

TensorName tensor_names(const MadeModel& made) {
  if (made.decoder) {
    return [config = *made.decoder](LayerId layer, std::string_view parameter) {
      return model::checkpoint_name(config, layer, parameter);
    };
  }
  return [model = made.layers](LayerId layer, std::string_view parameter) {
    return fmt::format("{}.{}", model[layer.index()]->name(), parameter);
  };
}

}  // namespace dynmo::train
