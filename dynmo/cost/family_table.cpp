// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/family_table.h"

#include <algorithm>

namespace dynmo::cost {
namespace {

constexpr std::string_view kLatentDefaults =
    R"({"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "first_k_dense_replace": 3, "n_shared_experts": 1,
        "num_experts_per_tok": 8})";
constexpr std::string_view kDeltaDefaults =
    R"({"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
        "head_dim": 256})";
constexpr std::string_view kGptNames =
    R"({"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
        "intermediate_size": "n_inner", "max_position_embeddings": "n_positions"})";

const std::vector<FamilyRow>& rows() {
  static const std::vector<FamilyRow> kRows = {
      {.types = {"llama"}, .classes = {"LlamaForCausalLM", "LLaMAForCausalLM"}},
      {.types = {"mistral", "ministral3"},
       .classes = {"MistralForCausalLM", "Ministral3ForCausalLM"},
       .traits = kNoBiasKeys},
      {.types = {"qwen2", "mimo", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"},
       .classes = {"Qwen2ForCausalLM", "MiMoForCausalLM", "Qwen2VLForConditionalGeneration",
                   "Qwen2_5_VLForConditionalGeneration"},
       .traits = kQkvBias | kNoBiasKeys},
      {.types = {"mixtral"},
       .classes = {"MixtralForCausalLM"},
       .traits = kNoBiasKeys | kExperts,
       .defaults = R"({"num_key_value_heads": 8})",
       .names = R"({"num_experts": "num_local_experts"})"},
      {.types = {"gpt2"},
       .classes = {"GPT2LMHeadModel"},
       .traits = kLayerNorm | kUngated | kLearnedPositions | kAllBiases,
       .defaults = R"({"tie_word_embeddings": true})",
       .names = kGptNames},
      {.types = {"gpt_bigcode"},
       .classes = {"GPTBigCodeForCausalLM"},
       .traits = kLayerNorm | kUngated | kLearnedPositions | kAllBiases,
       .defaults = R"({"tie_word_embeddings": true, "multi_query": true})",
       .names = kGptNames},
      {.types = {"qwen3", "qwen3_vl", "qwen3_vl_text"},
       .classes = {"Qwen3ForCausalLM"},
       .traits = kHeadNorm,
       .defaults = R"({"head_dim": 128})"},
      {.types = {"qwen2_moe"},
       .classes = {"Qwen2MoeForCausalLM"},
       .traits = kExperts | kSharedGate | kPlainOutput,
       .defaults = R"({"qkv_bias": true, "num_experts_per_tok": 4})",
       .names = R"({"attention_bias": "qkv_bias"})"},
      {.types = {"qwen3_moe", "qwen3_vl_moe", "qwen3_vl_moe_text"},
       .classes = {"Qwen3MoeForCausalLM"},
       .traits = kHeadNorm | kExperts},
      {.types = {"qwen3_5", "qwen3_5_text"},
       .classes = {"Qwen3_5ForCausalLM"},
       .traits = kHeadNorm | kElementGate,
       .defaults = kDeltaDefaults},
      {.types = {"qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"},
       .classes = {"Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"},
       .traits = kHeadNorm | kElementGate | kExperts | kSharedGate,
       .defaults = kDeltaDefaults},
      {.types = {"gemma"},
       .classes = {"GemmaForCausalLM"},
       .defaults = R"({"tie_word_embeddings": true, "head_dim": 256})"},
      {.types = {"gemma2"},
       .classes = {"Gemma2ForCausalLM"},
       .traits = kNormBehind,
       .defaults = R"({"tie_word_embeddings": true, "head_dim": 256, "sliding_window": 4096,
                       "sliding_window_pattern": 2})"},
      {.types = {"gemma3", "gemma3_text"},
       .classes = {"Gemma3ForCausalLM"},
       .traits = kNormBehind | kHeadNorm,
       .defaults = R"({"tie_word_embeddings": true, "head_dim": 256, "sliding_window": 4096,
                       "sliding_window_pattern": 6, "num_attention_heads": 8,
                       "num_key_value_heads": 4, "vocab_size": 262208,
                       "max_position_embeddings": 131072})"},
      {.types = {"gemma4", "gemma4_text"},
       .classes = {"Gemma4ForCausalLM"},
       .traits = kNormBehind | kHeadNorm | kExperts | kScaledRouter | kGlobalHeads,
       .defaults = R"({"tie_word_embeddings": true, "head_dim": 256, "global_head_dim": 512,
                       "sliding_window": 512, "sliding_window_pattern": 6,
                       "hidden_size_per_layer_input": 256})"},
      {.types = {"phi3"}, .classes = {"Phi3ForCausalLM"}, .traits = kNoBiasKeys},
      {.types = {"olmo2"}, .classes = {"Olmo2ForCausalLM"}, .traits = kWideNorm},
      {.types = {"olmo3"},
       .classes = {"Olmo3ForCausalLM"},
       .traits = kWideNorm,
       .defaults = R"({"sliding_window": 4096, "sliding_window_pattern": 4})"},
      {.types = {"granite"}, .classes = {"GraniteForCausalLM"}},
      {.types = {"granitemoe"}, .classes = {"GraniteMoeForCausalLM"}, .traits = kExperts},
      {.types = {"smollm3"},
       .classes = {"SmolLM3ForCausalLM"},
       .defaults = R"({"tie_word_embeddings": true})"},
      {.types = {"seed_oss"},
       .classes = {"SeedOssForCausalLM"},
       .traits = kPlainOutput,
       .defaults = R"({"attention_bias": true, "head_dim": 128})"},
      {.types = {"gpt_neox"},
       .classes = {"GPTNeoXForCausalLM"},
       .traits = kLayerNorm | kUngated | kMlpBiases,
       .defaults = R"({"attention_bias": true})"},
      {.types = {"starcoder2"},
       .classes = {"Starcoder2ForCausalLM"},
       .traits = kLayerNorm | kUngated,
       .defaults = R"({"use_bias": true, "tie_word_embeddings": true})",
       .names = R"({"attention_bias": "use_bias", "mlp_bias": "use_bias"})"},
      {.types = {"gpt_oss"},
       .classes = {"GptOssForCausalLM"},
       .traits = kSinks | kExperts | kRouterBias | kExpertBiases,
       .defaults = R"({"attention_bias": true, "head_dim": 64, "sliding_window": 128,
                       "sliding_window_pattern": 2})"},
      {.types = {"glm4_moe"},
       .classes = {"Glm4MoeForCausalLM"},
       .traits = kHeadNormKey | kExperts | kPlainOutput,
       .defaults = R"({"first_k_dense_replace": 1, "n_shared_experts": 1})"},
      {.types = {"minimax_m2"},
       .classes = {"MiniMaxM2ForCausalLM"},
       .traits = kWideNorm | kNoBiasKeys | kExperts},
      {.types = {"minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"},
       .classes = {"MiniMaxM3ForCausalLM", "MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForCausalLM"},
       .traits = kHeadNorm | kNoBiasKeys | kExperts},
      {.types = {"llama4", "llama4_text"},
       .classes = {"Llama4ForCausalLM"},
       .traits = kPlainNorm | kExperts,
       .defaults = R"({"n_shared_experts": 1, "interleave_moe_layer_step": 1, "head_dim": 128,
                       "no_rope_layer_interval": 4, "attention_chunk_size": 8192})"},
      {.types = {"mimo_v2_flash"},
       .classes = {"MiMoV2FlashForCausalLM"},
       .traits = kSlidingSinks | kPlainOutput | kExperts,
       .defaults = R"({"head_dim": 192, "v_head_dim": 128, "first_k_dense_replace": 1,
                       "sliding_window": 128})"},
      {.types = {"step3p7", "step3p5"},
       .classes = {"Step3p7FlashForCausalLM", "Step3p7ForCausalLM"},
       .traits = kHeadNorm | kHeadGate | kExperts,
       .defaults = R"({"first_k_dense_replace": 3, "moe_intermediate_size": 1280,
                       "share_expert_dim": 1280, "num_experts_per_tok": 8})"},
      {.types = {"deepseek_v2"},
       .classes = {"DeepseekV2ForCausalLM"},
       .traits = kLatent | kExperts,
       .defaults = R"({"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
                       "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 0,
                       "n_shared_experts": 2})"},
      {.types = {"deepseek_v3", "kimi_k2"},
       .classes = {"DeepseekV3ForCausalLM"},
       .traits = kLatent | kExperts,
       .defaults = kLatentDefaults},
      {.types = {"deepseek_v32", "glm_moe_dsa"},
       .classes = {"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"},
       .traits = kLatent | kIndexer | kExperts,
       .defaults = kLatentDefaults},
      {.types = {"deepseek_v4", "deepseek_ref"},
       .classes = {"DeepseekV4ForCausalLM"},
       .traits = kStreams | kExperts | kNoBiasKeys,
       .defaults = R"({"hc_mult": 4, "n_shared_experts": 1, "num_experts_per_tok": 6})"},
      {.types = {"nemotron_h"},
       .classes = {"NemotronHForCausalLM"},
       .traits = kSingles | kUngated | kExperts,
       .defaults = R"({"head_dim": 128, "n_shared_experts": 1, "n_groups": 8, "conv_kernel": 4,
                       "chunk_size": 128, "use_conv_bias": true})"},
      {.types = {"nemotron-nas"}, .classes = {"DeciLMForCausalLM"}, .traits = kBlockList},
  };
  return kRows;
}

}  // namespace

const FamilyRow* find_family(std::string_view type) {
  for (const FamilyRow& row : rows()) {
    if (std::find(row.types.begin(), row.types.end(), type) != row.types.end()) return &row;
  }
  return nullptr;
}

std::vector<std::string> family_types() {
  std::vector<std::string> types;
  for (const FamilyRow& row : rows()) types.insert(types.end(), row.types.begin(), row.types.end());
  return types;
}

}  // namespace dynmo::cost
