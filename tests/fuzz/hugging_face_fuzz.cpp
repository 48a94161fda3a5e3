// SPDX-License-Identifier: Apache-2.0
// A model description that is taken has a valid shape, and costs that the planner takes.
#include "dynmo/cost/device.h"
#include "dynmo/cost/hugging_face.h"
#include "tests/fuzz/target.h"

namespace dynmo::fuzz {

Outcome run_target(std::string_view text) {
  constexpr int kMaxBlocks = 256;  // whose costs are computed
  const auto json = parse_json(text, "config.json");
  if (!json) return refused(json.error());
  const auto shape = cost::parse_config(*json, "config.json", 128, 2);
  if (!shape) return refused(shape.error());
  const auto valid = cost::validate(*shape);
  DYNMO_CHECK(valid.has_value(), "a valid shape, got {}", valid.error().message);
  if (shape->blocks > kMaxBlocks) return Outcome::kTaken;
  const auto model = cost::transformer_costs(*shape, cost::devices().front());
  if (!model) {
    (void)refused(model.error());
    return Outcome::kTaken;
  }
  const auto costs = cost::validate(*model);
  DYNMO_CHECK(costs.has_value(), "valid costs, got {}", costs.error().message);
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  return {
      R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 172, "vocab_size": 1000,
          "max_position_embeddings": 256, "tie_word_embeddings": false})",
      R"({"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
          "vocab_size": 1000, "max_position_embeddings": 256, "num_local_experts": 4,
          "num_experts_per_tok": 2})",
      R"({"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 128,
          "n_inner": null, "vocab_size": 1000})",
      R"({"model_type": "glm_moe_dsa", "hidden_size": 64, "num_hidden_layers": 3,
          "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100,
          "max_position_embeddings": 256, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse", "sparse"],
          "indexer_types": ["full", "shared", "full"], "index_n_heads": 2, "index_head_dim": 16,
          "index_topk": 8, "q_lora_rank": 16, "kv_lora_rank": 8})",
      R"({"model_type": "nemotron_h", "hidden_size": 64, "hybrid_override_pattern": "M-*E",
          "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100,
          "max_position_embeddings": 256, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 24, "mamba_num_heads": 4, "mamba_head_dim": 16,
          "ssm_state_size": 8})",
      R"({"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"],
          "text_config": {"model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
          "vocab_size": 100, "max_position_embeddings": 256, "full_attention_interval": 4}})",
      R"({"model_type": "nemotron-nas", "hidden_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 256,
          "block_configs": [{"attention": {"n_heads_in_group": 2, "no_op": false},
          "ffn": {"ffn_mult": 1.5, "no_op": false}}]})",
      R"({"model_type": "minimax_m3", "hidden_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
          "dense_intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 256,
          "num_local_experts": 4, "num_experts_per_tok": 2, "moe_layer_freq": [0, 1],
          "sparse_attention_config": {"sparse_attention_freq": [0, 1],
          "sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_topk_blocks": 2,
          "sparse_block_size": 16}})"};
}

}  // namespace dynmo::fuzz
