// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/model_config.h"

#include <fmt/format.h>

namespace dynmo::train {
namespace {

// What both families call alike.
template <typename Decoder>
Decoder common(const Config::Model& m, std::int64_t vocabulary) {
  Decoder decoder;
  decoder.vocabulary = m.vocabulary > 0 ? m.vocabulary : vocabulary;
  decoder.hidden = m.hidden;
  decoder.blocks = m.blocks;
  decoder.heads = m.heads;
  decoder.intermediate = m.intermediate;
  decoder.sequence = m.sequence;
  decoder.dropout = m.dropout;
  decoder.tied_embeddings = m.tied_embeddings.value_or(decoder.tied_embeddings);
  return decoder;
}

void fill(Config::Model& m, const model::LlamaConfig& llama) {
  m.kv_heads = llama.kv_heads;
  m.positions = llama.positions;
  m.rope_theta = llama.rope_theta;
  m.norm_epsilon = llama.rms_epsilon;
}
void fill(Config::Model& m, const model::Gpt2Config& gpt2) {
  m.kv_heads = gpt2.heads;
  m.positions = gpt2.positions;
  m.norm_epsilon = gpt2.norm_epsilon;
}

}  // namespace

model::DecoderConfig decoder_config(const Config& config, std::int64_t vocabulary) {
  const Config::Model& m = config.model;
  if (model::parse_family(m.family).value() == model::Family::kGpt2) {
    auto gpt2 = common<model::Gpt2Config>(m, vocabulary);
    gpt2.positions = m.positions > 0 ? m.positions : m.sequence;
    gpt2.norm_epsilon = m.norm_epsilon;
    return gpt2;
  }
  auto llama = common<model::LlamaConfig>(m, vocabulary);
  llama.kv_heads = m.kv_heads;
  llama.positions = m.positions;
  llama.rope_theta = m.rope_theta;
  llama.rms_epsilon = m.norm_epsilon;
  return llama;
}

Config config_of(const model::DecoderConfig& decoder) {
  Config config;
  Config::Model& m = config.model;
  const model::DecoderSizes sizes = model::sizes(decoder);
  m.family = model::name(model::family(decoder));
  m.vocabulary = sizes.vocabulary;
  m.hidden = sizes.hidden;
  m.blocks = sizes.blocks;
  m.heads = sizes.heads;
  m.intermediate = sizes.intermediate;
  m.sequence = sizes.sequence;
  m.tied_embeddings = sizes.tied_embeddings;
  std::visit([&](const auto& d) { fill(m, d); }, decoder);
  return config;
}

std::vector<std::pair<std::string, std::string>> settings_of(const model::DecoderConfig& decoder) {
  const Config config = config_of(decoder);
  const Config::Model& m = config.model;
  std::vector<std::pair<std::string, std::string>> settings = {
      {"model.family", m.family},
      {"model.vocabulary", fmt::format("{}", m.vocabulary)},
      {"model.hidden", fmt::format("{}", m.hidden)},
      {"model.blocks", fmt::format("{}", m.blocks)},
      {"model.heads", fmt::format("{}", m.heads)},
      {"model.intermediate", fmt::format("{}", m.intermediate)},
      {"model.norm_epsilon", fmt::format("{}", m.norm_epsilon)}};
  if (model::family(decoder) == model::Family::kGpt2) {
    settings.emplace_back("model.positions", fmt::format("{}", m.positions));
  } else {
    settings.emplace_back("model.kv_heads", fmt::format("{}", m.kv_heads));
    settings.emplace_back("model.rope_theta", fmt::format("{}", m.rope_theta));
  }
  return settings;
}

}  // namespace dynmo::train
