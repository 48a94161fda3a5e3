// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/llama.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/decoder_limits_impl.h"
#include "dynmo/model/llama_impl.h"

namespace dynmo::model {
namespace {

ParameterSpec norm(std::string name, std::int64_t size) {
  return {.name = std::move(name), .shape = {size}, .deviation = 0, .mean = 1, .decays = false};
}

ParameterSpec matrix(std::string name, std::int64_t rows, std::int64_t columns, double deviation) {
  return {.name = std::move(name),
          .shape = {rows, columns},
          .deviation = deviation,
          .mean = 0,
          .decays = true};
}

double residual_deviation(const LlamaConfig& config) {
  return config.deviation / std::sqrt(2.0 * static_cast<double>(config.blocks));
}

std::vector<ParameterSpec> attention_specs(const LlamaConfig& config) {
  const std::int64_t kv = config.kv_heads * config.head_size();
  return {
      norm("input_layernorm.weight", config.hidden),
      matrix("self_attn.q_proj.weight", config.hidden, config.hidden, config.deviation),
      matrix("self_attn.k_proj.weight", kv, config.hidden, config.deviation),
      matrix("self_attn.v_proj.weight", kv, config.hidden, config.deviation),
      matrix("self_attn.o_proj.weight", config.hidden, config.hidden, residual_deviation(config))};
}

std::vector<ParameterSpec> mlp_specs(const LlamaConfig& config) {
  return {norm("post_attention_layernorm.weight", config.hidden),
          matrix("mlp.gate_proj.weight", config.intermediate, config.hidden, config.deviation),
          matrix("mlp.up_proj.weight", config.intermediate, config.hidden, config.deviation),
          matrix("mlp.down_proj.weight", config.hidden, config.intermediate,
                 residual_deviation(config))};
}

std::vector<ParameterSpec> head_specs(const LlamaConfig& config) {
  return {norm("norm.weight", config.hidden),
          matrix("lm_head.weight", config.vocabulary, config.hidden, config.deviation)};
}

Error fault(std::string_view field, double given, std::string_view wanted) {
  return make_error(ErrorCode::kBadInput, "model.{} is {:g}, wanted {}", field, given, wanted);
}

}  // namespace

Expected<void> validate(const LlamaConfig& config) {
  const SizeLimit sizes[] = {{"vocabulary", config.vocabulary, kMostTokens},
                             {"hidden", config.hidden, kMostHidden},
                             {"blocks", config.blocks, kMostBlocks},
                             {"heads", config.heads, kMostHidden},
                             {"kv_heads", config.kv_heads, kMostHidden},
                             {"intermediate", config.intermediate, kMostIntermediate},
                             {"sequence", config.sequence, kMostTokens}};
  DYNMO_TRY(check_sizes(sizes));
  if (config.hidden % config.heads != 0) {
    return make_error(ErrorCode::kBadInput,
                      "model.hidden is {}, wanted a multiple of model.heads ({}), such as {}",
                      config.hidden, config.heads,
                      (config.hidden / config.heads + 1) * config.heads);
  }
  if (config.head_size() % 2 != 0) {
    return make_error(ErrorCode::kBadInput,
                      "model.hidden / model.heads is {} / {} = {}, wanted an even head size for "
                      "rotary positions, such as model.hidden={}",
                      config.hidden, config.heads, config.head_size(),
                      config.heads * (config.head_size() + 1));
  }
  if (config.heads % config.kv_heads != 0) {
    return make_error(ErrorCode::kBadInput,
                      "model.kv_heads is {}, wanted a divisor of model.heads ({})", config.kv_heads,
                      config.heads);
  }
  if (config.sequence * config.head_size() > kMostAngles) {
    return make_error(
        ErrorCode::kBadInput,
        "model.sequence x model.hidden / model.heads is {} x {}, wanted at most {}: a "
        "table of that many angles is made",
        config.sequence, config.head_size(), kMostAngles);
  }
  const auto positive = [](double x) { return std::isfinite(x) && x > 0; };
  if (!positive(config.rope_theta)) return fault("rope_theta", config.rope_theta, "above 0");
  if (!positive(config.rms_epsilon)) return fault("norm_epsilon", config.rms_epsilon, "above 0");
  if (!positive(config.deviation)) return fault("deviation", config.deviation, "above 0");
  if (!(config.dropout >= 0 && config.dropout < 1)) {
    return fault("dropout", config.dropout, "0 or more and less than 1");
  }
  return {};
}

Model make_llama(const LlamaConfig& config) {
  const auto valid = validate(config);
  DYNMO_CHECK(valid.has_value(), "a valid config: {}", valid.error().message);
  Model model;
  model.push_back(embedding_layer(
      {matrix("embed_tokens.weight", config.vocabulary, config.hidden, config.deviation)}));
  const RotaryTable table = rotary_table(config.sequence, config.head_size(), config.rope_theta);
  for (std::int64_t block = 0; block < config.blocks; ++block) {
    model.push_back(attention_layer(fmt::format("blocks.{}.attention", block),
                                    attention_specs(config), config, table));
    model.push_back(mlp_layer(fmt::format("blocks.{}.mlp", block), mlp_specs(config), config));
  }
  model.push_back(head_layer(head_specs(config), config));
  return model;
}

std::string checkpoint_name(const LlamaConfig& config, LayerId layer, std::string_view parameter) {
  const std::int64_t last = 2 * config.blocks + 1;
  DYNMO_CHECK(layer.value >= 0 && layer.value <= last, "layer 0 to {}, got {}", last, layer.value);
  if (layer.value > 0 && layer.value < last) {
    return fmt::format("model.layers.{}.{}", (layer.value - 1) / 2, parameter);
  }
  return parameter == "lm_head.weight" ? std::string(parameter)
                                       : fmt::format("model.{}", parameter);
}

at::Tensor llama_logits(const LlamaConfig& config, const LayerState& head,
                        const at::Tensor& hidden_BTD) {
  const at::NoGradGuard no_graph;
  const at::Tensor x_ND = hidden_BTD.reshape({-1, config.hidden});
  const at::Tensor n_ND =
      normed(x_ND, inverse_rms(x_ND, config.rms_epsilon), head.parameters[0].value);
  return at::linear(n_ND, head.parameters[1].value)
      .view({hidden_BTD.size(0), hidden_BTD.size(1), config.vocabulary});
}

}  // namespace dynmo::model
