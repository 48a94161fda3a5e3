// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/llama.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/model/llama_impl.h"
#include "dynmo/model/operations.h"

namespace dynmo::model {
namespace {

constexpr std::uint64_t kResidualDropout = 1;

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

at::Tensor rows(const at::Tensor& x_BTD) { return x_BTD.reshape({-1, x_BTD.size(-1)}); }

// x + dropout(update), shaped like x. Adds into the update, whose values no gradient needs.
at::Tensor add_residual(const at::Tensor& x_BTD, const at::Tensor& update_ND, double p,
                        const LayerContext& context, const LayerState& state) {
  at::Tensor sum_ND = dropout(update_ND, p, state, context, kResidualDropout);
  sum_ND.add_(rows(x_BTD));
  return sum_ND.view(x_BTD.sizes());
}

at::Tensor logits_NV(const std::vector<at::Tensor>& p, const at::Tensor& hidden_BTD,
                     double epsilon) {
  return at::linear(rms_norm(rows(hidden_BTD), p[0], epsilon), p[1]);
}

Error fault(std::string_view field, double given, std::string_view wanted) {
  return make_error(ErrorCode::kBadInput, "model: {} is {:g}, wanted {}", field, given, wanted);
}

}  // namespace

Expected<void> validate(const LlamaConfig& config) {
  const std::pair<const char*, std::int64_t> counts[] = {
      {"vocabulary", config.vocabulary}, {"hidden", config.hidden},
      {"blocks", config.blocks},         {"heads", config.heads},
      {"kv_heads", config.kv_heads},     {"intermediate", config.intermediate},
      {"sequence", config.sequence}};
  constexpr std::int64_t kLargest = std::int64_t{1} << 30;
  for (const auto& [field, value] : counts) {
    if (value < 1 || value > kLargest) {
      return make_error(ErrorCode::kBadInput, "model: {} is {}, wanted 1 to {}", field, value,
                        kLargest);
    }
  }
  if (config.hidden % config.heads != 0) {
    return make_error(
        ErrorCode::kBadInput, "model: hidden is {}, wanted a multiple of heads ({}), such as {}",
        config.hidden, config.heads, (config.hidden / config.heads + 1) * config.heads);
  }
  if (config.head_size() % 2 != 0) {
    return make_error(ErrorCode::kBadInput,
                      "model: hidden / heads is {} / {} = {}, wanted an even head size for rotary "
                      "positions, such as hidden {}",
                      config.hidden, config.heads, config.head_size(),
                      config.heads * (config.head_size() + 1));
  }
  if (config.heads % config.kv_heads != 0) {
    return make_error(ErrorCode::kBadInput, "model: kv_heads is {}, wanted a divisor of heads ({})",
                      config.kv_heads, config.heads);
  }
  const auto positive = [](double x) { return std::isfinite(x) && x > 0; };
  if (!positive(config.rope_theta)) return fault("rope_theta", config.rope_theta, "above 0");
  if (!positive(config.rms_epsilon)) return fault("rms_epsilon", config.rms_epsilon, "above 0");
  if (!positive(config.deviation)) return fault("deviation", config.deviation, "above 0");
  if (!(config.dropout >= 0 && config.dropout < 1)) {
    return fault("dropout", config.dropout, "0 or more and less than 1");
  }
  return {};
}

AutogradFunction embedding_function() {
  return [](const std::vector<at::Tensor>& p, const at::Tensor&, const LayerContext& context,
            const LayerState&) { return at::embedding(p[0], context.tokens_BT); };
}

AutogradFunction attention_function(const LlamaConfig& config) {
  const RotaryTable table = rotary_table(config.sequence, config.head_size(), config.rope_theta);
  return [config, table](const std::vector<at::Tensor>& p, const at::Tensor& x_BTD,
                         const LayerContext& context, const LayerState& state) {
    const std::int64_t B = x_BTD.size(0);
    const std::int64_t T = x_BTD.size(1);
    const std::int64_t K = config.head_size();
    const at::Tensor unit_ND = rms_norm(rows(x_BTD), p[0], config.rms_epsilon);
    const auto heads = [&](const at::Tensor& weight, std::int64_t count) {
      return at::linear(unit_ND, weight).view({B, T, count, K});
    };
    const at::Tensor mixed_BTHK =
        causal_attention(rotate(heads(p[1], config.heads), table),
                         rotate(heads(p[2], config.kv_heads), table), heads(p[3], config.kv_heads));
    const at::Tensor update_ND = at::linear(mixed_BTHK.reshape({B * T, config.hidden}), p[4]);
    return add_residual(x_BTD, update_ND, config.dropout, context, state);
  };
}

AutogradFunction mlp_function(const LlamaConfig& config) {
  return [config](const std::vector<at::Tensor>& p, const at::Tensor& x_BTD,
                  const LayerContext& context, const LayerState& state) {
    const at::Tensor unit_ND = rms_norm(rows(x_BTD), p[0], config.rms_epsilon);
    const at::Tensor update_ND =
        at::linear(swiglu(at::linear(unit_ND, p[1]), at::linear(unit_ND, p[2])), p[3]);
    return add_residual(x_BTD, update_ND, config.dropout, context, state);
  };
}

AutogradFunction head_function(const LlamaConfig& config) {
  return [config](const std::vector<at::Tensor>& p, const at::Tensor& x_BTD,
                  const LayerContext& context, const LayerState&) {
    return mean_cross_entropy(logits_NV(p, x_BTD, config.rms_epsilon),
                              context.targets_BT.reshape({-1}));
  };
}

Model make_llama(const LlamaConfig& config) {
  const auto valid = validate(config);
  DYNMO_CHECK(valid.has_value(), "a valid config: {}", valid.error().message);
  Model model;
  model.push_back(autograd_layer(
      "embedding",
      {matrix("embed_tokens.weight", config.vocabulary, config.hidden, config.deviation)},
      embedding_function()));
  // One pair of tables and functions for all blocks.
  const AutogradFunction attention = attention_function(config);
  const AutogradFunction mlp = mlp_function(config);
  for (std::int64_t block = 0; block < config.blocks; ++block) {
    model.push_back(autograd_layer(fmt::format("blocks.{}.attention", block),
                                   attention_specs(config), attention));
    model.push_back(autograd_layer(fmt::format("blocks.{}.mlp", block), mlp_specs(config), mlp));
  }
  model.push_back(autograd_layer("head", head_specs(config), head_function(config)));
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
  return logits_NV({head.parameters[0].value, head.parameters[1].value}, hidden_BTD,
                   config.rms_epsilon)
      .view({hidden_BTD.size(0), hidden_BTD.size(1), config.vocabulary});
}

}  // namespace dynmo::model
