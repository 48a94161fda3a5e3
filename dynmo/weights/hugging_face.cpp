// SPDX-License-Identifier: Apache-2.0
#include "dynmo/weights/hugging_face.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string>

#include "dynmo/cost/hugging_face.h"
#include "dynmo/data/tokenizer.h"

namespace dynmo::weights {
namespace {

constexpr std::int64_t kMaxPositions = std::int64_t{1} << 20;
// Limit of the experts of a block, as in a run's config, and of all blocks together. Each expert
// has three matrices.
constexpr std::int64_t kMaxExperts = 4096;
constexpr std::int64_t kMaxAllExperts = std::int64_t{1} << 18;

Json without_nulls(const Json& json) {
  Json kept = Json::object();
  for (const auto& [key, value] : json.items()) {
    if (!value.is_null()) kept[key] = value;
  }
  return kept;
}

// Fails unless a key is absent or one of the values that are implemented.
void require(JsonObject& config, const Json& json, const std::string& key,
             const std::vector<Json>& wanted) {
  const auto found = json.find(key);
  if (found == json.end() || std::ranges::find(wanted, *found) != wanted.end()) return;
  std::vector<std::string> texts;
  for (const Json& value : wanted) texts.push_back(value.dump());
  config.fail(key, fmt::format("is {}, implemented is {}", found->dump(), fmt::join(texts, ", ")));
}

// Reads the term that keeps the norms from dividing by 0.
double epsilon(JsonObject& config, const std::string& key, double absent) {
  const double value = config.number(key, absent);
  if (!(value > 0)) config.fail(key, fmt::format("is {}, wanted above 0", value));
  return value;
}

void forbid(JsonObject& config, const Json& json, const std::string& key) {
  if (json.contains(key)) config.fail(key, "is given, which is not implemented");
}

// Reads rope_theta and its scaling. Scaling is in rope_parameters since version 5 of the library,
// and in rope_scaling before.
cost::Rotary rotary(JsonObject& config, const Json& json, const std::string& origin, double theta) {
  cost::Rotary rope{.theta = config.number("rope_theta", theta)};
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const auto found = json.find(key);
    if (found == json.end()) continue;
    if (!found->is_object()) {
      config.fail(key, fmt::format("is {}, wanted an object", found->dump()));
      return rope;
    }
    const Json kept = without_nulls(*found);
    JsonObject entry(kept, origin, fmt::format("/{}", key));
    rope.theta = entry.number("rope_theta", rope.theta);
    require(entry, kept, "partial_rotary_factor", {1.0});
    entry.ignore("partial_rotary_factor");
    for (const char* type : {"type", "rope_type"}) {
      require(entry, kept, type, {"default", "linear", "llama3"});
    }
    const std::string type = entry.string("rope_type", entry.string("type", "default"));
    if (type == "linear" || type == "llama3") rope.factor = entry.number("factor");
    if (type == "linear") rope.scaling = cost::RotaryScaling::kLinear;
    if (type == "llama3") {
      rope.scaling = cost::RotaryScaling::kLlama3;
      rope.low_freq_factor = entry.number("low_freq_factor");
      rope.high_freq_factor = entry.number("high_freq_factor");
      rope.original_positions = entry.integer("original_max_position_embeddings");
    }
    config.take_fault(entry);
  }
  return rope;
}

// Returns the object `rope_parameters` of a config.json.
Json rope_parameters(const cost::Rotary& rope) {
  Json json = {{"rope_theta", rope.theta}, {"rope_type", "default"}};
  if (rope.scaling == cost::RotaryScaling::kNone) return json;
  json["rope_type"] = cost::kRotaryScalingNames[static_cast<std::size_t>(rope.scaling)];
  json["factor"] = rope.factor;
  if (rope.scaling == cost::RotaryScaling::kLinear) return json;
  json["low_freq_factor"] = rope.low_freq_factor;
  json["high_freq_factor"] = rope.high_freq_factor;
  json["original_max_position_embeddings"] = rope.original_positions;
  return json;
}

// The values of absent keys, in which the families that are read as a Llama differ.
struct LlamaDefaults {
  double rope_theta = 1e4;
  double rms_epsilon = 1e-6;
};

model::LlamaConfig llama(JsonObject& config, const Json& json, const std::string& origin,
                         const cost::TransformerShape& shape, const LlamaDefaults& absent = {}) {
  require(config, json, "hidden_act", {"silu"});
  require(config, json, "attention_bias", {false});
  require(config, json, "mlp_bias", {false});
  require(config, json, "partial_rotary_factor", {1.0});
  // A table of angles is made for every position.
  if (shape.positions > kMaxPositions) {
    config.fail("max_position_embeddings",
                fmt::format("is {}, implemented are at most {}", shape.positions, kMaxPositions));
  }
  model::LlamaConfig llama;
  llama.shape = shape;
  llama.rope = rotary(config, json, origin, absent.rope_theta);
  llama.rms_epsilon = epsilon(config, "rms_norm_eps", absent.rms_epsilon);
  return llama;
}

void forbid_window(JsonObject& config, const Json& json) {
  const auto window = json.find("sliding_window");
  if (window == json.end()) return;
  config.fail(
      "sliding_window",
      fmt::format("is {}, implemented is null: attention to all tokens before", window->dump()));
}

// Reads a Llama with experts.
model::LlamaConfig mixtral(JsonObject& config, const Json& json, const std::string& origin,
                           const cost::TransformerShape& shape) {
  require(config, json, "router_jitter_noise", {0.0});
  if (shape.experts_per_token == 1) {
    config.fail("num_experts_per_tok",
                "is 1, implemented are 2 or more: the gate of one expert would be 1 whatever the "
                "router says");
  }
  const std::int64_t most = std::min(kMaxExperts, kMaxAllExperts / shape.blocks);
  if (shape.experts > most) {
    config.fail("num_local_experts", fmt::format("is {}, implemented are at most {} in {} blocks",
                                                 shape.experts, most, shape.blocks));
  }
  forbid_window(config, json);
  return llama(config, json, origin, shape, {.rope_theta = 1e6, .rms_epsilon = 1e-5});
}

// Reads a Llama whose queries, keys and values have a bias.
model::LlamaConfig qwen2(JsonObject& config, const Json& json, const std::string& origin,
                         const cost::TransformerShape& shape) {
  require(config, json, "use_sliding_window", {false});
  model::LlamaConfig qwen = llama(config, json, origin, shape);
  qwen.qkv_bias = true;
  return qwen;
}

model::Gpt2Config gpt2(JsonObject& config, const Json& json, const cost::TransformerShape& shape) {
  require(config, json, "activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  require(config, json, "scale_attn_weights", {true});
  require(config, json, "scale_attn_by_inverse_layer_idx", {false});
  require(config, json, "reorder_and_upcast_attn", {false});
  require(config, json, "add_cross_attention", {false});
  model::Gpt2Config gpt2;
  gpt2.shape = shape;
  gpt2.shape.kv_heads = 0;
  gpt2.norm_epsilon = epsilon(config, "layer_norm_epsilon", 1e-5);
  return gpt2;
}

// Adds the special tokens that the files of both families name. Without them the library's defaults
// would apply, which are ordinary tokens here.
void add_special_tokens(Json& json, std::int64_t vocabulary) {
  json["bos_token_id"] = nullptr;
  json["eos_token_id"] =
      vocabulary == data::kByteVocabulary ? Json(data::kByteEndOfDocument) : Json(nullptr);
}

Json config_of(const model::LlamaConfig& config) {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"vocab_size", config.shape.vocabulary},
          {"hidden_size", config.shape.hidden},
          {"intermediate_size", config.shape.intermediate},
          {"num_hidden_layers", config.shape.blocks},
          {"num_attention_heads", config.shape.heads},
          {"num_key_value_heads", config.shape.kv_heads},
          {"head_dim", config.head_size()},
          {"max_position_embeddings", std::max(config.shape.positions, config.shape.sequence)},
          {"rope_theta", config.rope.theta},
          {"rope_parameters", rope_parameters(config.rope)},
          {"rms_norm_eps", config.rms_epsilon},
          {"hidden_act", "silu"},
          {"tie_word_embeddings", config.tied_embeddings},
          {"attention_bias", false},
          {"mlp_bias", false},
          {"torch_dtype", "float32"}};
}

// Converts a Llama's config to a Qwen2's.
void make_qwen2(Json& json) {
  json.update({{"architectures", {"Qwen2ForCausalLM"}},
               {"model_type", "qwen2"},
               {"use_sliding_window", false}});
  for (const char* key : {"attention_bias", "mlp_bias", "head_dim"}) json.erase(key);
}

// Converts a Llama's config to a Mixtral's.
void make_mixtral(Json& json, const Experts& experts) {
  json.update({{"architectures", {"MixtralForCausalLM"}},
               {"model_type", "mixtral"},
               {"num_local_experts", experts.count},
               {"num_experts_per_tok", experts.per_token},
               {"router_jitter_noise", 0.0},
               {"sliding_window", nullptr}});
  json.erase("attention_bias");  // keys that it does not have
  json.erase("mlp_bias");
}

Json config_of(const model::Gpt2Config& config) {
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"model_type", "gpt2"},
          {"vocab_size", config.shape.vocabulary},
          {"n_positions", config.shape.positions},
          {"n_embd", config.shape.hidden},
          {"n_layer", config.shape.blocks},
          {"n_head", config.shape.heads},
          {"n_inner", config.shape.intermediate},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", config.norm_epsilon},
          {"embd_pdrop", config.dropout},
          {"resid_pdrop", config.dropout},
          {"attn_pdrop", 0.0},
          {"tie_word_embeddings", config.tied_embeddings},
          {"torch_dtype", "float32"}};
}

}  // namespace

Expected<HuggingFaceModel> parse_hugging_face(const Json& json, std::string_view origin) {
  // Reads and checks the sizes in the same way as the planner.
  const auto shape_read = cost::parse_config(json, origin, 1);
  if (!shape_read) {
    const Error& error = shape_read.error();
    if (error.message.starts_with(origin)) return error;
    return make_error(error.code, "{}: {}", origin, error.message);
  }
  const cost::TransformerShape& shape = *shape_read;
  const Json kept = without_nulls(json);
  const std::string config_origin(origin);
  JsonObject config(kept, config_origin);
  require(config, kept, "model_type", {"llama", "gpt2", "mistral", "mixtral", "qwen2"});
  forbid(config, kept, "quantization_config");
  if (shape.head_size * shape.heads != shape.hidden) {
    config.fail("head_dim", fmt::format("is {}, implemented is hidden size / heads = {} / {}",
                                        shape.head_size, shape.hidden, shape.heads));
  }
  HuggingFaceModel model;
  model::DecoderConfig& decoder = model.decoder;
  const std::string type = config.string("model_type");
  if (type == "gpt2") {
    decoder = gpt2(config, kept, shape);
  } else if (type == "mixtral") {
    decoder = mixtral(config, kept, config_origin, shape);
    model.experts = {.count = shape.experts, .per_token = shape.experts_per_token};
  } else if (type == "qwen2") {
    decoder = qwen2(config, kept, config_origin, shape);
  } else {
    if (type == "mistral") {
      // (Absent, it is 4096 tokens there.)
      if (!json.contains("sliding_window")) {
        config.fail("sliding_window", "is missing, implemented is null");
      }
      forbid_window(config, kept);
    }
    decoder = llama(config, kept, config_origin, shape);
  }
  std::visit(
      [&](auto& d) {
        d.shape.sequence = shape.positions;
        d.tied_embeddings = shape.tied_embedding;
      },
      decoder);
  for (const auto& [key, value] : kept.items()) config.ignore(key);  // other keys are allowed
  DYNMO_TRY(config.finish());
  const auto valid = model::validate(decoder);
  if (!valid) return make_error(ErrorCode::kBadInput, "{}: {}", origin, valid.error().message);
  return model;
}

std::string left_out(const Json& json) {
  if (!json.is_object()) return "";
  std::vector<std::string> found;
  for (const char* key : {"attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"}) {
    const auto value = json.find(key);
    if (value == json.end() || value->is_null() || *value == 0) continue;
    found.push_back(fmt::format("{} = {}", key, value->dump()));
  }
  if (found.empty()) return "";
  return fmt::format(
      "its {} is not taken over: set model.dropout for what half blocks add (attention's "
      "probabilities have none here)",
      fmt::join(found, ", "));
}

Json hugging_face_config(const HuggingFaceModel& model) {
  Json json = std::visit([](const auto& c) { return config_of(c); }, model.decoder);
  const auto* llama = std::get_if<model::LlamaConfig>(&model.decoder);
  if (llama != nullptr && llama->qkv_bias) make_qwen2(json);
  if (model.experts) make_mixtral(json, *model.experts);
  add_special_tokens(json, model::shape_of(model.decoder).vocabulary);
  return json;
}

Expected<std::vector<checkpoint::Safetensors>> open_hugging_face(
    const std::filesystem::path& directory) {
  std::vector<checkpoint::Safetensors> files;
  std::error_code fault;
  if (std::filesystem::exists(directory / "model.safetensors", fault)) {
    DYNMO_ASSIGN(checkpoint::Safetensors file,
                 checkpoint::Safetensors::open(directory / "model.safetensors"));
    files.push_back(std::move(file));
    return files;
  }
  const std::filesystem::path index = directory / "model.safetensors.index.json";
  if (!std::filesystem::exists(index, fault)) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' has neither model.safetensors nor model.safetensors.index.json: wanted "
                      "a folder that transformers' save_pretrained writes",
                      directory.string());
  }
  DYNMO_ASSIGN(const Json json, read_json(index));
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (map == json.end() || !map->is_object()) {
    return make_error(ErrorCode::kBadInput, "{}: /weight_map is missing, wanted an object",
                      index.string());
  }
  std::map<std::string, std::size_t> opened;
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || std::filesystem::path(name).filename() != name) {
      return make_error(ErrorCode::kBadInput, "{}: /weight_map/{} is {}, wanted a file beside it",
                        index.string(), tensor, file.dump());
    }
    if (!opened.contains(name)) {
      DYNMO_ASSIGN(checkpoint::Safetensors shard, checkpoint::Safetensors::open(directory / name));
      opened.emplace(name, files.size());
      files.push_back(std::move(shard));
    }
    if (files[opened.at(name)].find(tensor) == nullptr) {
      return make_error(ErrorCode::kBadInput, "{}: tensor '{}' is not in {}", index.string(),
                        tensor, name);
    }
  }
  return files;
}

}  // namespace dynmo::weights
