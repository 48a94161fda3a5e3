// SPDX-License-Identifier: Apache-2.0
// Families of models by the keys that their files have. Sizes and totals are those that are known
// of the published models; tests/python/torch_families_test.py compares every block of small ones
// with the classes of transformers.
#include <gtest/gtest.h>

#include <set>

#include "dynmo/cost/family_table.h"
#include "dynmo/cost/hugging_face.h"
#include "tests/support/temp_folder.h"

namespace dynmo::cost {
namespace {

Json sizes_of(const char* type, int blocks, int hidden, int heads, int kv_heads, int inner,
              int vocabulary) {
  return {{"model_type", type},
          {"num_hidden_layers", blocks},
          {"hidden_size", hidden},
          {"num_attention_heads", heads},
          {"num_key_value_heads", kv_heads},
          {"intermediate_size", inner},
          {"vocab_size", vocabulary},
          {"max_position_embeddings", 8192}};
}

Json with(Json json, const Json& more) {
  json.update(more);
  return json;
}

const Json kDeepSeekV3 = with(sizes_of("deepseek_v3", 61, 7168, 128, 128, 18432, 129280),
                              {{"architectures", {"DeepseekV3ForCausalLM"}},
                               {"q_lora_rank", 1536},
                               {"kv_lora_rank", 512},
                               {"qk_nope_head_dim", 128},
                               {"qk_rope_head_dim", 64},
                               {"v_head_dim", 128},
                               {"first_k_dense_replace", 3},
                               {"moe_layer_freq", 1},
                               {"n_routed_experts", 256},
                               {"n_shared_experts", 1},
                               {"num_experts_per_tok", 8},
                               {"moe_intermediate_size", 2048},
                               {"num_nextn_predict_layers", 1}});
const Json kQwen35 =
    with(sizes_of("qwen3_5_text", 64, 5120, 24, 4, 17408, 248320), {{"head_dim", 256},
                                                                    {"full_attention_interval", 4},
                                                                    {"attn_output_gate", true},
                                                                    {"linear_num_key_heads", 16},
                                                                    {"linear_num_value_heads", 48},
                                                                    {"linear_key_head_dim", 128},
                                                                    {"linear_value_head_dim", 128},
                                                                    {"linear_conv_kernel_dim", 4}});

TransformerShape shape_of(const Json& config, std::int64_t sequence = 512) {
  return parse_config(config, "c", sequence).value();
}

std::string refusal_of(const Json& config) {
  return parse_config(config, "c", 512).error().message;
}

double total(const TransformerShape& shape, double LayerWork::*field) {
  double sum = 0;
  for (const LayerWork& work : transformer_work(shape)) sum += work.*field;
  return sum;
}

double parameters(const Json& config) { return total(shape_of(config), &LayerWork::parameters); }

TEST(Families, ParametersAreThoseOfThePublishedModels) {
  EXPECT_EQ(
      parameters(with(sizes_of("qwen3", 36, 4096, 32, 8, 12288, 151936), {{"head_dim", 128}})),
      8'190'735'360);
  EXPECT_EQ(parameters(with(sizes_of("qwen3_moe", 48, 2048, 32, 4, 6144, 151936),
                            {{"head_dim", 128},
                             {"num_experts", 128},
                             {"num_experts_per_tok", 8},
                             {"moe_intermediate_size", 768}})),
            30'532'122'624);
  EXPECT_EQ(parameters(with(sizes_of("gpt_oss", 24, 2880, 64, 8, 2880, 201088),
                            {{"num_local_experts", 32}, {"num_experts_per_tok", 4}})),
            20'914'757'184);
  EXPECT_EQ(parameters(kDeepSeekV3), 671'026'404'352);
  EXPECT_EQ(parameters(kQwen35), 26'895'998'464);
  EXPECT_EQ(parameters(with(sizes_of("gemma2", 26, 2304, 8, 4, 9216, 256000), Json::object())),
            2'614'341'888);
}

TEST(Families, EveryTypeHasOneRow) {
  const std::vector<std::string> types = family_types();
  EXPECT_EQ(std::set<std::string>(types.begin(), types.end()).size(), types.size());
  for (const std::string& type : types) EXPECT_NE(find_family(type), nullptr);
  EXPECT_EQ(find_family("bert"), nullptr);
}

TEST(Families, PlainBlocksAreFieldsAndOthersHaveHalves) {
  EXPECT_TRUE(shape_of(sizes_of("llama", 4, 64, 4, 2, 96, 100)).halves.empty());
  EXPECT_EQ(shape_of(sizes_of("olmo2", 4, 64, 4, 2, 96, 100)).halves.size(), 8);
  EXPECT_EQ(shape_of(with(sizes_of("nemotron_h", 3, 64, 4, 2, 96, 100),
                          {{"hybrid_override_pattern", "M-*"},
                           {"mamba_num_heads", 4},
                           {"mamba_head_dim", 16},
                           {"ssm_state_size", 8}}))
                .halves.size(),
            3);
}

TEST(Families, LayersAreNamedByWhatTheyAre) {
  std::vector<std::string> names;
  const Json config = with(kQwen35, {{"num_hidden_layers", 4}});
  for (const LayerWork& work : transformer_work(shape_of(config))) names.push_back(work.name);
  EXPECT_EQ(names, (std::vector<std::string>{
                       "embedding", "blocks.0.linear_attention", "blocks.0.mlp",
                       "blocks.1.linear_attention", "blocks.1.mlp", "blocks.2.linear_attention",
                       "blocks.2.mlp", "blocks.3.attention", "blocks.3.mlp", "head"}));
}

TEST(Families, AWindowBoundsTheAttention) {
  const Json config = with(sizes_of("olmo3", 4, 64, 4, 4, 96, 100), {{"sliding_window", 128}});
  const auto core = [&](std::int64_t sequence, std::size_t layer) {
    return transformer_work(shape_of(config, sequence))[layer].core_flops;
  };
  constexpr std::size_t kSliding = 1, kFull = 7;
  EXPECT_EQ(core(128, kSliding), core(128, kFull));
  EXPECT_EQ(core(4096, kFull), 4.0 * 4096 * 4096 * 64 / 2);
  // All but the first 128 tokens attend to 128, those to half of it.
  EXPECT_DOUBLE_EQ(core(4096, kSliding), 4.0 * 64 * ((4096 - 128) * 128 + 128 * 128 / 2.0));
}

TEST(Families, ATokenIsMultipliedWithItsExpertsAndTheCommonMlp) {
  const LayerWork moe = transformer_work(shape_of(kDeepSeekV3))[8];
  ASSERT_EQ(moe.name, "blocks.3.moe");
  const double expert = 3.0 * 7168 * 2048;
  EXPECT_EQ(moe.matrix_flops, 2 * 512 * (9 * expert + 7168 * 256));
  EXPECT_EQ(moe.parameters, 257 * expert + 7168 * 256 + 7168);
  EXPECT_EQ(transformer_work(shape_of(kDeepSeekV3))[6].name, "blocks.2.mlp");
}

TEST(Families, TheTextModelOfAFileWithSeveralIsPlanned) {
  const Json text = with(sizes_of("qwen3_vl_text", 2, 64, 4, 2, 96, 100), {{"head_dim", 16}});
  const Json config = {{"model_type", "qwen3_vl"},
                       {"architectures", {"Qwen3VLForConditionalGeneration"}},
                       {"tie_word_embeddings", true},
                       {"vision_config", {{"depth", 2}}},
                       {"text_config", text}};
  const TransformerShape shape = shape_of(config);
  EXPECT_TRUE(shape.tied_embedding);
  EXPECT_EQ(shape.notes, std::vector<std::string>{"only the text model is counted"});
  EXPECT_EQ(total(shape, &LayerWork::parameters),
            parameters(with(text, {{"model_type", "qwen3"}, {"tie_word_embeddings", true}})));
  Json broken = config;
  broken["text_config"].erase("hidden_size");
  EXPECT_EQ(refusal_of(broken), "c: /text_config/hidden_size is missing");
}

TEST(Families, NotesSayWhatIsLeftOut) {
  EXPECT_EQ(shape_of(with(kDeepSeekV3, {{"quantization_config", {{"quant_method", "fp8"}}}})).notes,
            (std::vector<std::string>{"the file's weights are quantized (fp8): planned is training "
                                      "them in the device's precision",
                                      "multi-token prediction is not counted"}));
  EXPECT_TRUE(shape_of(sizes_of("llama", 4, 64, 4, 2, 96, 100)).notes.empty());
}

// A known type with layers of its own would be planned as another model.
TEST(Families, KeysThatChangeTheShapeAreRefused) {
  const Json llama = sizes_of("llama", 4, 64, 4, 2, 96, 100);
  const std::pair<Json, const char*> cases[] = {
      {with(llama, {{"attention_head_type", "multiquery"}}),
       "c: /attention_head_type is \"multiquery\", which is not planned in a model of type llama"},
      {with(llama, {{"num_local_experts", 8}}),
       "c: /num_local_experts is 8, which is not planned in a model of type llama"},
      {with(llama, {{"add_cross_attention", true}}),
       "c: /add_cross_attention is true, which is not planned in a model of type llama"},
      {with(llama, {{"block_configs", {{"attention", {}}}}}),
       "c: /block_configs is object, which is not planned in a model of type llama"},
      {with(llama, {{"layer_types", {"full_attention", "x", "x", "x"}}}),
       "c: /layer_types has 'x', which is not planned in this family"},
      {with(llama, {{"layer_types", {"full_attention"}}}),
       "c: /layer_types is a list of 1, wanted a list with an entry for each of the 4 blocks"},
      {with(sizes_of("qwen2", 4, 64, 4, 2, 96, 100), {{"kv_lora_rank", 8}}),
       "c: /kv_lora_rank is 8, which is not planned in a model of type qwen2"},
      {with(kDeepSeekV3, {{"moe_layer_freq", 2}}), "c: /moe_layer_freq is 2, wanted 1 or a list"},
  };
  for (const auto& [config, message] : cases) EXPECT_EQ(refusal_of(config), message);
  for (const Json& off : {Json(false), Json(0), Json(nullptr), Json::array(), Json::object()}) {
    EXPECT_TRUE(parse_config(with(llama, {{"block_configs", off}}), "c", 512));
  }
  EXPECT_TRUE(parse_config(with(llama, {{"attention_head_type", "multihead"}}), "c", 512));
}

TEST(Families, ClassesWithoutALanguageModelHeadAreRefused) {
  const Json llama = sizes_of("llama", 4, 64, 4, 2, 96, 100);
  const auto of_class = [&](const char* name) {
    return parse_config(with(llama, {{"architectures", {name}}}), "c", 512);
  };
  EXPECT_TRUE(of_class("LlamaForCausalLM"));
  for (const char* name : {"LlamaForSequenceClassification", "LlamaModel", "LlamaForCausalLMEagle3",
                           "LlamaForConditionalGeneration"}) {
    EXPECT_EQ(of_class(name).error().message,
              std::string("c: /architectures/0 is '") + name +
                  "', planned is LlamaForCausalLM or LLaMAForCausalLM: a model with a "
                  "language-model head");
  }
  EXPECT_EQ(refusal_of(with(llama, {{"auto_map", {{"AutoModelForCausalLM", "own.OwnModel"}}}})),
            "c: /auto_map/AutoModelForCausalLM is 'own.OwnModel', planned is LlamaForCausalLM or "
            "LLaMAForCausalLM: a model with a language-model head");
  EXPECT_TRUE(parse_config(
      with(llama, {{"auto_map", {{"AutoModelForCausalLM", "own.LlamaForCausalLM"}}}}), "c", 512));
}

TEST(Families, InfinityIsReadAsTextAndNamedWhereItIsNeeded) {
  const TempFolder folder;
  const auto read = [&](const std::string& more) {
    const std::string text = sizes_of("llama", 4, 64, 4, 2, 96, 100).dump();
    return read_config(
        folder.write("config.json", text.substr(0, text.size() - 1) + ", " + more + "}"), 64);
  };
  EXPECT_TRUE(
      read(R"("time_step_limit": [0.0, Infinity], "x": NaN, "y": "Infinity", "z": -Infinity)"));
  EXPECT_NE(read(R"("head_dim": Infinity)")
                .error()
                .message.find("/head_dim is \"Infinity\", wanted a whole number"),
            std::string::npos);
}

TEST(Families, ManyBlocksAreRefusedBeforeTheyAreMade) {
  EXPECT_EQ(refusal_of(sizes_of("olmo2", 1 << 30, 64, 4, 2, 96, 100)),
            "model.blocks is 1073741824, wanted 1 to 100000");
}

TEST(Families, ResidualStreamsPassBetweenLayers) {
  Json config =
      with(sizes_of("deepseek_v4", 3, 64, 4, 1, 96, 100), {{"head_dim", 32},
                                                           {"q_lora_rank", 16},
                                                           {"o_lora_rank", 8},
                                                           {"o_groups", 2},
                                                           {"index_n_heads", 2},
                                                           {"index_head_dim", 16},
                                                           {"index_topk", 8},
                                                           {"compress_ratios", {0, 4, 128, 0}},
                                                           {"n_routed_experts", 4},
                                                           {"num_experts_per_tok", 2},
                                                           {"moe_intermediate_size", 24}});
  const std::vector<LayerWork> layers = transformer_work(shape_of(config));
  EXPECT_EQ(layers[0].boundary_bytes, 4 * 512 * 64 * 2);
  config["compress_ratios"] = {0, 4, 7, 0};
  EXPECT_EQ(refusal_of(config), "c: /compress_ratios has 7, which is not planned");
}

TEST(Families, ListsOfBlocksMayHaveAnyOrder) {
  const Json mixture =
      with(sizes_of("qwen2_moe", 4, 64, 4, 4, 128, 512), {{"num_experts", 4},
                                                          {"num_experts_per_tok", 2},
                                                          {"moe_intermediate_size", 32},
                                                          {"shared_expert_intermediate_size", 32},
                                                          {"decoder_sparse_step", 1}});
  const auto parameters = [&](const Json& dense) {
    double sum = 0;
    for (const LayerWork& layer :
         transformer_work(shape_of(with(mixture, {{"mlp_only_layers", dense}})), 2)) {
      sum += layer.parameters;
    }
    return sum;
  };
  const double two_dense = parameters({0, 3});
  EXPECT_NE(two_dense, parameters(Json::array()));
  EXPECT_EQ(parameters({3, 0}), two_dense);
}

}  // namespace
}  // namespace dynmo::cost
