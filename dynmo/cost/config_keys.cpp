// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/config_keys.h"

#include <fmt/format.h>

#include <algorithm>

namespace dynmo::cost {
namespace {

Json with_family_defaults(const Json& json, const FamilyRow& row) {
  if (!json.is_object()) return json;
  Json all = Json::parse(row.defaults);
  for (const auto& [key, value] : json.items()) all[key] = value;
  Json kept = Json::object();
  for (const auto& [key, value] : all.items()) {
    if (!value.is_null()) kept[key] = value;
  }
  return kept;
}

// Keys that change what a model holds or multiplies. Each is absent or off in a family that does
// not read it.
constexpr std::string_view kShapeKeys[] = {
    "add_cross_attention",
    "altup_num_inputs",
    "attention_head_type",
    "attention_output_gate",
    "attn_output_gate",
    "block_configs",
    "compress_ratios",
    "cross_attention_hidden_size",
    "cross_attention_layers",
    "draft_vocab_size",
    "eagle_config",
    "first_k_dense_replace",
    "hc_mult",
    "hidden_size_per_layer_input",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "index_topk",
    "is_encoder_decoder",
    "kv_lora_rank",
    "laurel_rank",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_key_heads",
    "mlp_bias",
    "moe_latent_size",
    "moe_num_experts",
    "multi_query",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts",
    "num_kv_shared_layers",
    "num_local_experts",
    "num_reward_heads",
    "o_lora_rank",
    "per_layer_config",
    "projection_dim",
    "pruned_heads",
    "q_lora_rank",
    "qk_layernorm",
    "qk_norm_type",
    "routed_expert_hidden_size",
    "share_expert_dim",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "sparse_attention_config",
    "ssm_state_size",
    "use_bias",
    "use_double_wide_mlp",
    "use_qk_norm",
    "word_embed_proj_dim",
};

bool is_off(std::string_view key, const Json& value) {
  if (key == "attention_head_type") return value == "multihead";
  const bool nothing = (value.is_array() || value.is_object()) && value.empty();
  return value.is_null() || value == false || value == 0 || nothing;
}

}  // namespace

ConfigKeys::ConfigKeys(const Json& json, const FamilyRow& row, std::string origin,
                       std::string pointer)
    : names_(Json::parse(row.names)),
      kept_(with_family_defaults(json, row)),
      given_(json),
      object_(kept_, std::move(origin), std::move(pointer)) {}

std::string ConfigKeys::own(const std::string& key) const {
  const auto found = names_.find(key);
  return found == names_.end() ? key : found->get<std::string>();
}

const Json* ConfigKeys::find(const std::string& key) {
  const std::string name = own(key);
  asked_.insert(name);
  if (!kept_.is_object()) return nullptr;
  const auto found = kept_.find(name);
  return found == kept_.end() ? nullptr : &*found;
}

std::string ConfigKeys::first_of(std::initializer_list<std::string_view> keys) {
  std::string first;
  for (const std::string_view key : keys) {
    if (find(std::string(key)) != nullptr && first.empty()) first = key;
  }
  return first.empty() ? std::string(*keys.begin()) : first;
}

std::int64_t ConfigKeys::size(const std::string& key, std::optional<std::int64_t> fallback,
                              std::int64_t least) {
  const std::string name = own(key);
  asked_.insert(name);
  const std::int64_t value = object_.integer(name, fallback);
  if (value < least || value > kMaxConfigSize) {
    fail(key, fmt::format("is {}, wanted {} to {}", value, least, kMaxConfigSize));
    return least;
  }
  return value;
}

bool ConfigKeys::flag(const std::string& key, bool fallback) {
  const std::string name = own(key);
  asked_.insert(name);
  return object_.boolean(name, fallback);
}

std::vector<std::string> ConfigKeys::list(const std::string& key, std::int64_t blocks) {
  const Json* found = find(key);
  std::vector<std::string> values;
  if (found == nullptr) return values;
  if (!found->is_array() || static_cast<std::int64_t>(found->size()) < blocks) {
    fail(key,
         fmt::format("is {}, wanted a list with an entry for each of the {} blocks",
                     found->is_array() ? fmt::format("a list of {}", found->size()) : found->dump(),
                     blocks));
    return values;
  }
  for (std::int64_t i = 0; i < blocks; ++i) {
    const Json& value = (*found)[static_cast<std::size_t>(i)];
    if (value.is_boolean()) {
      values.emplace_back(value.get<bool>() ? "1" : "0");
    } else {
      values.push_back(value.is_string() ? value.get<std::string>() : value.dump());
    }
  }
  return values;
}

void ConfigKeys::fail(const std::string& key, std::string_view message) {
  object_.fail(own(key), message);
}

void ConfigKeys::refuse_unread(std::string_view type) {
  if (!given_.is_object()) return;
  for (const std::string_view key : kShapeKeys) {
    const auto found = given_.find(std::string(key));
    if (found == given_.end() || asked_.count(std::string(key)) > 0 || is_off(key, *found))
      continue;
    object_.fail(
        std::string(key),
        fmt::format("is {}, which is not planned in a model of type {}",
                    found->is_structured() ? std::string(found->type_name()) : found->dump(),
                    type));
  }
}

Expected<void> ConfigKeys::finish() {
  if (kept_.is_object()) {
    for (const auto& [key, value] : kept_.items()) object_.ignore(key);  // foreign keys are allowed
  }
  return object_.finish();
}

}  // namespace dynmo::cost
