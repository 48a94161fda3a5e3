// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/gpt2.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "dynmo/core/check.h"
#include "dynmo/model/family_impl.h"
#include "dynmo/model/family_layers_impl.h"

namespace dynmo::model {
namespace {

Specs embedding_specs(const Gpt2Config& config) {
  return {matrix("wte.weight", config.shape.vocabulary, config.shape.hidden, config.init_std),
          matrix("wpe.weight", config.shape.positions, config.shape.hidden, config.init_std)};
}

Specs attention_specs(const Gpt2Config& config) {
  const std::int64_t D = config.shape.hidden;
  const UnitAxis heads = {.kind = UnitKind::kHeads, .count = config.shape.heads};
  UnitAxis of_columns = heads;
  of_columns.axis = 1;
  of_columns.sections = 3;
  UnitAxis of_bias = heads;
  of_bias.sections = 3;
  return {constant("ln_1.weight", D, 1),
          constant("ln_1.bias", D, 0),
          with_units(block_matrix("attn.c_attn.weight", D, 3 * D, config.init_std), of_columns),
          with_units(constant("attn.c_attn.bias", 3 * D, 0), of_bias),
          with_units(block_matrix("attn.c_proj.weight", D, D,
                                  residual_init_std(config.init_std, config.shape.blocks)),
                     heads),
          constant("attn.c_proj.bias", D, 0)};
}

Specs mlp_specs(const Gpt2Config& config) {
  const std::int64_t D = config.shape.hidden;
  const std::int64_t F = config.shape.intermediate;
  return {
      constant("ln_2.weight", D, 1),
      constant("ln_2.bias", D, 0),
      with_units(block_matrix("mlp.c_fc.weight", D, F, config.init_std), {.count = F, .axis = 1}),
      with_units(constant("mlp.c_fc.bias", F, 0), {.count = F}),
      with_units(block_matrix("mlp.c_proj.weight", F, D,
                              residual_init_std(config.init_std, config.shape.blocks)),
                 {.count = F}),
      constant("mlp.c_proj.bias", D, 0)};
}

Specs head_specs(const Gpt2Config& config) {
  return {constant("ln_f.weight", config.shape.hidden, 1),
          constant("ln_f.bias", config.shape.hidden, 0),
          matrix("lm_head.weight", config.shape.vocabulary, config.shape.hidden, config.init_std)};
}

}  // namespace

Expected<void> validate(const Gpt2Config& config) {
  cost::DecoderShape shape = config.shape;
  if (shape.kv_heads == 0) shape.kv_heads = shape.heads;
  DYNMO_TRY(cost::validate(shape, kDecoderLimits));
  DYNMO_TRY(check_heads(shape.hidden, shape.heads));
  if (shape.kv_heads != shape.heads) {
    return make_error(ErrorCode::kBadInput,
                      "model.kv_heads is {}, wanted model.heads ({}) or 0 for gpt2", shape.kv_heads,
                      shape.heads);
  }
  if (shape.positions < shape.sequence) {
    return make_error(ErrorCode::kBadInput,
                      "model.positions is {}, wanted at least the {} tokens of model.sequence",
                      shape.positions, shape.sequence);
  }
  DYNMO_TRY(check_positive({{"norm_epsilon", config.norm_epsilon}, {"init_std", config.init_std}}));
  return check_dropout(config.dropout);
}

Model make_gpt2(const Gpt2Config& config) {
  const auto valid = validate(config);
  DYNMO_CHECK(valid.has_value(), "a valid config: {}", valid.error().message);
  Model model;
  model.push_back(gpt2_embedding_layer(embedding_specs(config), config));
  for (std::int64_t block = 0; block < config.shape.blocks; ++block) {
    model.push_back(gpt2_attention_layer(fmt::format("blocks.{}.attention", block),
                                         attention_specs(config), config));
    model.push_back(gpt2_mlp_layer(fmt::format("blocks.{}.mlp", block), mlp_specs(config), config));
  }
  add_gpt2_head(head_specs(config), config, model);
  return model;
}

std::string checkpoint_name(const Gpt2Config&, const Place& place, std::string_view parameter) {
  return checkpoint_name("transformer", "h", place, parameter);
}

at::Tensor gpt2_logits(const Gpt2Config& config, const LayerState& head,
                       const at::Tensor& hidden_BTD) {
  const at::NoGradGuard no_graph;
  const auto value = [&](std::size_t i) { return head.parameters[i].value; };
  return at::linear(
      at::layer_norm(hidden_BTD, {config.shape.hidden}, value(0), value(1), config.norm_epsilon),
      value(2));
}

}  // namespace dynmo::model
