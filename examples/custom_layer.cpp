// SPDX-License-Identifier: Apache-2.0
// A layer of your own in a pipeline that moves its layers: docs/models.md walks through it.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdio>

#include "dynmo/dynamism/freezing/options.h"
#include "dynmo/model/autograd_layer.h"
#include "dynmo/model/decoder.h"
#include "dynmo/train/run.h"
#include "dynmo/transport/in_process.h"
#include "dynmo/weights/model_config.h"

namespace {

using namespace dynmo;

// [layer]
// Squared ReLU (So et al. 2021, "Primer") as a half block: x + down(relu(up(x))^2).
std::shared_ptr<const model::Layer> squared_relu(std::string name, std::int64_t hidden) {
  return model::autograd_layer(
      std::move(name),
      {{.name = "up.weight", .shape = {4 * hidden, hidden}, .init_std = 0.02},
       {.name = "down.weight", .shape = {hidden, 4 * hidden}, .init_std = 0.02}},
      [](const auto& weights, const at::Tensor& x_BTD, const auto&, const auto&) {
        return x_BTD + at::linear(at::relu(at::linear(x_BTD, weights[0])).square(), weights[1]);
      });
}
// [layer]

// [model]
// The usual decoder with the MLP of every block replaced.
Expected<model::Recipe> primer(const config::Config& config, std::int64_t vocabulary) {
  const model::DecoderConfig decoder = weights::decoder_config(config, vocabulary);
  DYNMO_TRY(model::validate(decoder));
  model::Recipe recipe = model::make_recipe(decoder);
  for (auto& [place, layer] : recipe.slots) {
    if (place.part != model::Part::kMlp) continue;
    layer = squared_relu(layer->name(), config.model.shape.hidden);
  }
  return recipe;
}
// [model]

}  // namespace

// Usage: custom_layer DATA_FOLDER RUN_FOLDER. Trains on two ranks, here as threads of this process.
int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr,
                 "usage: %s DATA_FOLDER RUN_FOLDER (a folder made by `dynmo data prepare`, one to "
                 "write to)\n",
                 argv[0]);
    return 2;
  }
  // [train]
  train::TrainOptions options;
  options.make_model = primer;
  options.config.data.path = argv[1];
  options.config.run.directory = argv[2];
  options.config.model.shape = {
      .hidden = 64, .blocks = 3, .heads = 4, .kv_heads = 2, .intermediate = 64, .sequence = 32};
  options.config.train.steps = 30;
  options.config.sources.enable<dynamism::FreezingOptions>().schedule = {.fraction = 0.5,
                                                                         .every = 5};
  train::Reporter reporter;
  reporter.line = [](std::string_view text) {
    std::printf("%.*s\n", static_cast<int>(text.size()), text.data());
  };
  const auto status = transport::run_ranks(2, [&](transport::Transport& transport) {
    at::set_num_threads(1);
    return train::train(transport, options, reporter);
  });
  // [train]
  if (status.has_value()) return 0;
  std::fprintf(stderr, "custom_layer: error: %s\n", status.error().message.c_str());
  return exit_code(status.error().code);
}
