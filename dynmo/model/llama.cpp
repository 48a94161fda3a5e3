// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/llama.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "dynmo/core/check.h"
#include "dynmo/model/family_impl.h"
#include "dynmo/model/family_layers_impl.h"

namespace dynmo::model {
namespace {

Specs attention_specs(const LlamaConfig& config) {
  const std::int64_t D = config.shape.hidden;
  const std::int64_t kv = config.shape.kv_heads * config.head_size();
  // Heads that share keys and values are one unit, and rows of q, k and v.
  const UnitAxis of_rows = {.kind = UnitKind::kHeads, .count = config.shape.kv_heads};
  UnitAxis of_columns = of_rows;
  of_columns.axis = 1;
  const auto rows = [&](const char* name, std::int64_t size) {
    return with_units(block_matrix(name, size, D, config.init_std), of_rows);
  };
  Specs specs = {constant("input_layernorm.weight", D, 1), rows("self_attn.q_proj.weight", D),
                 rows("self_attn.k_proj.weight", kv), rows("self_attn.v_proj.weight", kv),
                 with_units(block_matrix("self_attn.o_proj.weight", D, D,
                                         residual_init_std(config.init_std, config.shape.blocks)),
                            of_columns)};
  if (config.qkv_bias) {
    specs.push_back(with_units(constant("self_attn.q_proj.bias", D, 0), of_rows));
    specs.push_back(with_units(constant("self_attn.k_proj.bias", kv, 0), of_rows));
    specs.push_back(with_units(constant("self_attn.v_proj.bias", kv, 0), of_rows));
  }
  return specs;
}

Specs mlp_specs(const LlamaConfig& config) {
  const std::int64_t D = config.shape.hidden;
  const std::int64_t F = config.shape.intermediate;
  return {constant("post_attention_layernorm.weight", D, 1),
          with_units(block_matrix("mlp.gate_proj.weight", F, D, config.init_std), {.count = F}),
          with_units(block_matrix("mlp.up_proj.weight", F, D, config.init_std), {.count = F}),
          with_units(block_matrix("mlp.down_proj.weight", D, F,
                                  residual_init_std(config.init_std, config.shape.blocks)),
                     {.count = F, .axis = 1})};
}

Specs head_specs(const LlamaConfig& config) {
  return {constant("norm.weight", config.shape.hidden, 1),
          matrix("lm_head.weight", config.shape.vocabulary, config.shape.hidden, config.init_std)};
}

}  // namespace

Expected<void> validate(const LlamaConfig& config) {
  DYNMO_TRY(cost::validate(config.shape, kDecoderLimits));
  DYNMO_TRY(check_heads(config.shape.hidden, config.shape.heads));
  if (config.head_size() % 2 != 0) {
    return make_error(ErrorCode::kBadInput,
                      "model.hidden / model.heads is {} / {} = {}, wanted an even head size for "
                      "rotary positions, such as model.hidden={}",
                      config.shape.hidden, config.shape.heads, config.head_size(),
                      config.shape.heads * (config.head_size() + 1));
  }
  if (config.shape.sequence * config.head_size() > kMaxAngles) {
    return make_error(
        ErrorCode::kBadInput,
        "model.sequence x model.hidden / model.heads is {} x {}, wanted at most {}: a "
        "table of that many angles is made",
        config.shape.sequence, config.head_size(), kMaxAngles);
  }
  DYNMO_TRY(cost::validate(config.rope));
  DYNMO_TRY(check_positive({{"norm_epsilon", config.rms_epsilon}, {"init_std", config.init_std}}));
  return check_dropout(config.dropout);
}

Model make_llama(const LlamaConfig& config) {
  const auto valid = validate(config);
  DYNMO_CHECK(valid.has_value(), "a valid config: {}", valid.error().message);
  Model model;
  model.push_back(embedding_layer({matrix("embed_tokens.weight", config.shape.vocabulary,
                                          config.shape.hidden, config.init_std)}));
  const kernels::RotaryTable table = kernels::rotary_table(
      config.shape.sequence, cost::frequencies(config.rope, config.head_size()));
  for (std::int64_t block = 0; block < config.shape.blocks; ++block) {
    model.push_back(attention_layer(fmt::format("blocks.{}.attention", block),
                                    attention_specs(config), config, table));
    model.push_back(mlp_layer(fmt::format("blocks.{}.mlp", block), mlp_specs(config), config));
  }
  add_head(head_specs(config), config, model);
  return model;
}

std::string checkpoint_name(const LlamaConfig&, const Place& place, std::string_view parameter) {
  return checkpoint_name("model", "layers", place, parameter);
}

at::Tensor llama_logits(const LlamaConfig& config, const LayerState& head,
                        const at::Tensor& hidden_BTD) {
  const at::NoGradGuard no_graph;
  const at::Tensor x_ND = hidden_BTD.reshape({-1, config.shape.hidden});
  const at::Tensor n_ND =
      kernels::rms_norm(x_ND, head.parameters[0].value, config.rms_epsilon).y_ND;
  return at::linear(n_ND, head.parameters[1].value)
      .view({hidden_BTD.size(0), hidden_BTD.size(1), config.shape.vocabulary});
}

}  // namespace dynmo::model
