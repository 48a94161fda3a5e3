// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/gpt2.h"

#include <ATen/ATen.h>

#include "dynmo/core/check.h"
#include "dynmo/model/family_impl.h"
#include "dynmo/model/gpt2_impl.h"

namespace dynmo::model {
namespace {

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
          matrix("attn.c_proj.weight", D, D, residual_deviation(config.deviation, config.blocks)),
          constant("attn.c_proj.bias", D, 0)};
}

Specs mlp_specs(const Gpt2Config& config) {
  const std::int64_t D = config.hidden;
  const std::int64_t F = config.intermediate;
  return {constant("ln_2.weight", D, 1),
          constant("ln_2.bias", D, 0),
          matrix("mlp.c_fc.weight", D, F, config.deviation),
          constant("mlp.c_fc.bias", F, 0),
          matrix("mlp.c_proj.weight", F, D, residual_deviation(config.deviation, config.blocks)),
          constant("mlp.c_proj.bias", D, 0)};
}

Specs head_specs(const Gpt2Config& config) {
  return {constant("ln_f.weight", config.hidden, 1), constant("ln_f.bias", config.hidden, 0),
          matrix("lm_head.weight", config.vocabulary, config.hidden, config.deviation)};
}

}  // namespace

Expected<void> validate(const Gpt2Config& config) {
  DYNMO_TRY(check_sizes({{"vocabulary", config.vocabulary, kMostTokens},
                         {"hidden", config.hidden, kMostHidden},
                         {"blocks", config.blocks, kMostBlocks},
                         {"heads", config.heads, kMostHidden},
                         {"intermediate", config.intermediate, kMostIntermediate},
                         {"sequence", config.sequence, kMostTokens},
                         {"positions", config.positions, kMostTokens}}));
  DYNMO_TRY(check_heads(config.hidden, config.heads));
  if (config.positions < config.sequence) {
    return make_error(ErrorCode::kBadInput,
                      "model.positions is {}, wanted at least the {} tokens of model.sequence",
                      config.positions, config.sequence);
  }
  DYNMO_TRY(
      check_positive({{"norm_epsilon", config.norm_epsilon}, {"deviation", config.deviation}}));
  return check_dropout(config.dropout);
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
  return checkpoint_name("transformer", "h", config.blocks, layer, parameter);
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
