// SPDX-License-Identifier: Apache-2.0
#include "dynmo/weights/model_config.h"

#include <fmt/format.h>

namespace dynmo::weights {
namespace {

void fill(config::Config::Model& m, const model::LlamaConfig& llama) {
  m.shape = llama.shape;
  m.rope = llama.rope;
  m.qkv_bias = llama.qkv_bias;
  m.norm_epsilon = llama.rms_epsilon;
}
void fill(config::Config::Model& m, const model::Gpt2Config& gpt2) {
  m.shape = gpt2.shape;
  m.shape.kv_heads = gpt2.shape.heads;
  m.norm_epsilon = gpt2.norm_epsilon;
}

}  // namespace

model::DecoderConfig decoder_config(const config::Config& config, std::int64_t vocabulary) {
  const config::Config::Model& m = config.model;
  cost::DecoderShape shape = m.shape;
  if (shape.vocabulary == 0) shape.vocabulary = vocabulary;
  if (cost::parse_family(m.family).value() == cost::Family::kGpt2) {
    shape.kv_heads = 0;
    if (shape.positions == 0) shape.positions = shape.sequence;
    model::Gpt2Config gpt2{.shape = shape, .norm_epsilon = m.norm_epsilon, .dropout = m.dropout};
    gpt2.tied_embeddings = m.tied_embeddings.value_or(gpt2.tied_embeddings);
    return gpt2;
  }
  model::LlamaConfig llama{
      .shape = shape, .rope = m.rope, .rms_epsilon = m.norm_epsilon, .dropout = m.dropout};
  llama.qkv_bias = m.qkv_bias;
  llama.tied_embeddings = m.tied_embeddings.value_or(llama.tied_embeddings);
  return llama;
}

config::Config config_of(const model::DecoderConfig& decoder) {
  config::Config config;
  config::Config::Model& m = config.model;
  m.family = cost::name(model::family(decoder));
  m.tied_embeddings = model::tied(decoder);
  std::visit([&](const auto& d) { fill(m, d); }, decoder);
  return config;
}

std::vector<std::pair<std::string, std::string>> settings_of(const model::DecoderConfig& decoder) {
  const config::Config config = config_of(decoder);
  const config::Config::Model& m = config.model;
  std::vector<std::pair<std::string, std::string>> settings = {
      {"model.family", m.family},
      {"model.vocabulary", fmt::format("{}", m.shape.vocabulary)},
      {"model.hidden", fmt::format("{}", m.shape.hidden)},
      {"model.blocks", fmt::format("{}", m.shape.blocks)},
      {"model.heads", fmt::format("{}", m.shape.heads)},
      {"model.intermediate", fmt::format("{}", m.shape.intermediate)},
      {"model.norm_epsilon", fmt::format("{}", m.norm_epsilon)}};
  if (model::family(decoder) == cost::Family::kGpt2) {
    settings.emplace_back("model.positions", fmt::format("{}", m.shape.positions));
  } else {
    settings.emplace_back("model.kv_heads", fmt::format("{}", m.shape.kv_heads));
    settings.emplace_back("model.rope_theta", fmt::format("{}", m.rope.theta));
    settings.emplace_back("model.rope_scaling",
                          cost::kRotaryScalingNames[static_cast<std::size_t>(m.rope.scaling)]);
    settings.emplace_back("model.rope_factor", fmt::format("{}", m.rope.factor));
    settings.emplace_back("model.rope_low_freq_factor", fmt::format("{}", m.rope.low_freq_factor));
    settings.emplace_back("model.rope_high_freq_factor",
                          fmt::format("{}", m.rope.high_freq_factor));
    settings.emplace_back("model.rope_original_positions",
                          fmt::format("{}", m.rope.original_positions));
    settings.emplace_back("model.qkv_bias", fmt::format("{}", m.qkv_bias));
  }
  return settings;
}

}  // namespace dynmo::weights
