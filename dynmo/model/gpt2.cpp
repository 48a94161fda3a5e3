// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/gpt2.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/decoder_limits_impl.h"
#include "dynmo/model/gpt2_impl.h"

namespace dynmo::model {
namespace {

ParameterSpec constant(std::string name, std::int64_t size, double value) {
  return {.name = std::move(name), .shape = {size}, .deviation = 0, .mean = value, .decays = false};
}

ParameterSpec matrix(std::string name, std::int64_t rows, std::int64_t columns, double deviation) {
  return {.name = std::move(name),
          .shape = {rows, columns},
          .deviation = deviation,
          .mean = 0,
          .decays = true};
}

// Of the two projections into the residual stream.
double residual_deviation(const Gpt2Config& config) {
  return config.deviation / std::sqrt(2.0 * static_cast<double>(config.blocks));
}

Specs embedding_specs(const Gpt2Config& config) {
  return {matrix("wte.weight", config.vocabulary, config.hidden, config.deviation),
          matrix("wpe.weight", config.positions, config.hidden, config.deviation)};
}

Specs attention_specs(const Gpt2Config& config) {
  const std::int64_t D = config.hidden;
  return {constant("ln_1.weight", D, 1),
          constant("ln_1.bias", D, 0),
          matrix("attn.c_attn.weight", D, 3 * D, config.deviation),
          constant("attn.c_attn.bias", 3 * D, 0),
          matrix("attn.c_proj.weight", D, D, residual_deviation(config)),
          constant("attn.c_proj.bias", D, 0)};
}

Specs mlp_specs(const Gpt2Config& config) {
  const std::int64_t D = config.hidden;
  const std::int64_t F = config.intermediate;
  return {constant("ln_2.weight", D, 1),
          constant("ln_2.bias", D, 0),
          matrix("mlp.c_fc.weight", D, F, config.deviation),
          constant("mlp.c_fc.bias", F, 0),
          matrix("mlp.c_proj.weight", F, D, residual_deviation(config)),
          constant("mlp.c_proj.bias", D, 0)};
}

Specs head_specs(const Gpt2Config& config) {
  return {constant("ln_f.weight", config.hidden, 1), constant("ln_f.bias", config.hidden, 0),
          matrix("lm_head.weight", config.vocabulary, config.hidden, config.deviation)};
}

}  // namespace

Expected<void> validate(const Gpt2Config& config) {
  const SizeLimit sizes[] = {{"vocabulary", config.vocabulary, kMostTokens},
                             {"hidden", config.hidden, kMostHidden},
                             {"blocks", config.blocks, kMostBlocks},
                             {"heads", config.heads, kMostHidden},
                             {"intermediate", config.intermediate, kMostIntermediate},
                             {"sequence", config.sequence, kMostTokens},
                             {"positions", config.positions, kMostTokens}};
  DYNMO_TRY(check_sizes(sizes));
  if (config.hidden % config.heads != 0) {
    return make_error(ErrorCode::kBadInput,
                      "model.hidden is {}, wanted a multiple of model.heads ({}), such as {}",
                      config.hidden, config.heads,
                      (config.hidden / config.heads + 1) * config.heads);
  }
  if (config.positions < config.sequence) {
    return make_error(ErrorCode::kBadInput,
                      "model.positions is {}, wanted at least the {} tokens of model.sequence",
                      config.positions, config.sequence);
  }
  const std::pair<const char*, double> amounts[] = {{"norm_epsilon", config.norm_epsilon},
                                                    {"deviation", config.deviation}};
  for (const auto& [field, value] : amounts) {
    if (!(std::isfinite(value) && value > 0)) {
      return make_error(ErrorCode::kBadInput, "model.{} is {:g}, wanted above 0", field, value);
    }
  }
  if (!(config.dropout >= 0 && config.dropout < 1)) {
    return make_error(ErrorCode::kBadInput,
                      "model.dropout is {:g}, wanted 0 or more and less than 1", config.dropout);
  }
  return {};
}

Model make_gpt2(const Gpt2Config& config) {
  const auto valid = validate(config);
  DYNMO_CHECK(valid.has_value(), "a valid config: {}", valid.error().message);
  Model model;
  model.push_back(gpt2_embedding_layer(embedding_specs(config), config));
  for (std::int64_t block = 0; block < config.blocks; ++block) {
    model.push_back(gpt2_attention_layer(fmt::format("blocks.{}.attention", block),
                                         attention_specs(config), config));
    model.push_back(gpt2_mlp_layer(fmt::format("blocks.{}.mlp", block), mlp_specs(config), config));
  }
  model.push_back(gpt2_head_layer(head_specs(config), config));
  return model;
}

std::string checkpoint_name(const Gpt2Config& config, LayerId layer, std::string_view parameter) {
  const std::int64_t last = 2 * config.blocks + 1;
  DYNMO_CHECK(layer.value >= 0 && layer.value <= last, "layer 0 to {}, got {}", last, layer.value);
  if (layer.value > 0 && layer.value < last) {
    return fmt::format("transformer.h.{}.{}", (layer.value - 1) / 2, parameter);
  }
  return parameter == "lm_head.weight" ? std::string(parameter)
                                       : fmt::format("transformer.{}", parameter);
}

at::Tensor gpt2_logits(const Gpt2Config& config, const LayerState& head,
                       const at::Tensor& hidden_BTD) {
  const at::NoGradGuard no_graph;
  const auto value = [&](std::size_t i) { return head.parameters[i].value; };
  return at::linear(
      at::layer_norm(hidden_BTD, {config.hidden}, value(0), value(1), config.norm_epsilon),
      value(2));
}

}  // namespace dynmo::model
