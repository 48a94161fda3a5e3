// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/hugging_face.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "dynmo/core/nearest.h"

namespace dynmo::cost {
namespace {

constexpr std::int64_t kMaxConfigSize = std::int64_t{1} << 30;

std::int64_t size(JsonObject& config, const std::string& key,
                  std::optional<std::int64_t> fallback = {}) {
  const std::int64_t value = config.integer(key, fallback);
  if (value < 1 || value > kMaxConfigSize) {
    config.fail(key, fmt::format("is {}, wanted 1 to {}", value, kMaxConfigSize));
    return 1;
  }
  return value;
}

// hidden / heads, which must be whole, unless the config says otherwise.
std::int64_t head_size(JsonObject& config, const std::string& heads_key,
                       const TransformerShape& shape) {
  const std::int64_t given = size(config, "head_dim", kMaxConfigSize);
  if (given != kMaxConfigSize) return given;
  if (shape.hidden % shape.heads != 0) {
    config.fail(heads_key, fmt::format("is {}, wanted a divisor of the hidden size {}, or head_dim",
                                       shape.heads, shape.hidden));
  }
  return shape.hidden / shape.heads;
}

std::int64_t positions(JsonObject& config, const std::string& key, std::int64_t sequence) {
  const std::int64_t most = size(config, key);
  if (sequence > most) {
    config.fail(key, fmt::format("is {}, less than the sequence of {} tokens that is asked for",
                                 most, sequence));
  }
  return most;
}

// Llama and those that share its keys. `kv_heads` where the key is absent; none: as many as heads.
void read_llama(JsonObject& config, std::string_view type, std::optional<std::int64_t> kv_heads,
                TransformerShape& shape) {
  shape.blocks = static_cast<int>(size(config, "num_hidden_layers"));
  shape.hidden = size(config, "hidden_size");
  shape.heads = size(config, "num_attention_heads");
  shape.kv_heads = size(config, "num_key_value_heads", kv_heads.value_or(shape.heads));
  if (shape.heads % shape.kv_heads != 0) {
    config.fail("num_key_value_heads", fmt::format("is {}, wanted a divisor of the {} heads",
                                                   shape.kv_heads, shape.heads));
  }
  shape.head_size = head_size(config, "num_attention_heads", shape);
  shape.intermediate = size(config, "intermediate_size");
  shape.gated_mlp = true;
  shape.vocabulary = size(config, "vocab_size");
  shape.tied_embedding = config.boolean("tie_word_embeddings", false);
  shape.positions = positions(config, "max_position_embeddings", shape.sequence);
  if (type == "llama") {
    shape.qkv_biases = shape.projection_biases = config.boolean("attention_bias", false);
    shape.mlp_biases = config.boolean("mlp_bias", false);
  }
  if (type == "qwen2") shape.qkv_biases = true;
}

void read_experts(JsonObject& config, TransformerShape& shape) {
  shape.experts = size(config, "num_local_experts");
  shape.experts_per_token = size(config, "num_experts_per_tok");
  if (shape.experts_per_token > shape.experts) {
    config.fail("num_experts_per_tok", fmt::format("is {}, wanted at most the {} experts",
                                                   shape.experts_per_token, shape.experts));
  }
}

void read_gpt2(JsonObject& config, TransformerShape& shape) {
  shape.blocks = static_cast<int>(size(config, "n_layer"));
  shape.hidden = size(config, "n_embd");
  shape.heads = shape.kv_heads = size(config, "n_head");
  shape.head_size = head_size(config, "n_head", shape);
  shape.intermediate = size(config, "n_inner", std::min(4 * shape.hidden, kMaxConfigSize));
  shape.vocabulary = size(config, "vocab_size");
  shape.tied_embedding = config.boolean("tie_word_embeddings", true);
  shape.learned_positions = true;
  shape.positions = positions(config, "n_positions", shape.sequence);
  shape.norm_biases = shape.qkv_biases = shape.projection_biases = shape.mlp_biases = true;
}

Json without_nulls(const Json& json) {
  Json kept = Json::object();
  for (const auto& [key, value] : json.items()) {
    if (!value.is_null()) kept[key] = value;
  }
  return kept;
}

}  // namespace

Expected<TransformerShape> parse_config(const Json& json, std::string_view origin,
                                        std::int64_t sequence, std::int64_t micro_batch_size) {
  const Json kept = json.is_object() ? without_nulls(json) : json;
  JsonObject config(kept, std::string(origin));
  const std::vector<std::string> known = {"llama", "mistral", "qwen2", "mixtral", "gpt2"};
  const std::string type = config.string("model_type");
  TransformerShape shape;
  shape.sequence = sequence;
  shape.micro_batch_size = micro_batch_size;
  if (std::find(known.begin(), known.end(), type) == known.end()) {
    config.fail("model_type", fmt::format("is '{}', known are {}", type, fmt::join(known, ", ")));
  } else if (type == "gpt2") {
    read_gpt2(config, shape);
  } else {
    // (null is a value there, too: as many as heads.)
    const bool eight = type == "mixtral" && !json.contains("num_key_value_heads");
    read_llama(config, type, eight ? std::optional<std::int64_t>(8) : std::nullopt, shape);
    if (type == "mixtral") read_experts(config, shape);
  }
  for (const auto& [key, value] : kept.items()) config.ignore(key);  // their file, their keys
  DYNMO_TRY(config.finish());
  DYNMO_TRY(validate(shape));
  return shape;
}

Expected<TransformerShape> read_config(const std::filesystem::path& path, std::int64_t sequence,
                                       std::int64_t micro_batch_size) {
  std::error_code fault;
  const bool folder = std::filesystem::is_directory(path, fault);
  const std::filesystem::path file = folder ? path / "config.json" : path;
  DYNMO_ASSIGN(const Json json, read_json(file));
  return parse_config(json, file.string(), sequence, micro_batch_size);
}

}  // namespace dynmo::cost
