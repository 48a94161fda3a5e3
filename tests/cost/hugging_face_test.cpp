// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/hugging_face.h"

#include <gtest/gtest.h>

#include "dynmo/cost/device.h"
#include "tests/support/temp_folder.h"

namespace dynmo::cost {
namespace {

// The published sizes; keys we do not need are among them.
const Json kGpt2 = {
    {"model_type", "gpt2"}, {"n_embd", 768},       {"n_layer", 12},
    {"n_head", 12},         {"n_inner", nullptr},  {"n_positions", 1024},
    {"n_ctx", 1024},        {"vocab_size", 50257}, {"activation_function", "gelu_new"}};
const Json kLlama2 = {{"model_type", "llama"},        {"hidden_size", 4096},
                      {"num_hidden_layers", 32},      {"num_attention_heads", 32},
                      {"num_key_value_heads", 32},    {"intermediate_size", 11008},
                      {"vocab_size", 32000},          {"max_position_embeddings", 4096},
                      {"tie_word_embeddings", false}, {"rope_scaling", nullptr}};
const Json kLlama3 = {{"model_type", "llama"},    {"hidden_size", 4096},
                      {"num_hidden_layers", 32},  {"num_attention_heads", 32},
                      {"num_key_value_heads", 8}, {"intermediate_size", 14336},
                      {"vocab_size", 128256},     {"max_position_embeddings", 8192},
                      {"attention_bias", false}};
const Json kMistral = {{"model_type", "mistral"},  {"hidden_size", 4096},
                       {"num_hidden_layers", 32},  {"num_attention_heads", 32},
                       {"num_key_value_heads", 8}, {"intermediate_size", 14336},
                       {"vocab_size", 32000},      {"max_position_embeddings", 32768},
                       {"sliding_window", 4096}};
const Json kQwen2 = {{"model_type", "qwen2"},      {"hidden_size", 896},
                     {"num_hidden_layers", 24},    {"num_attention_heads", 14},
                     {"num_key_value_heads", 2},   {"intermediate_size", 4864},
                     {"vocab_size", 151936},       {"max_position_embeddings", 131072},
                     {"tie_word_embeddings", true}};
const Json kMixtral = {{"model_type", "mixtral"},     {"hidden_size", 4096},
                       {"num_hidden_layers", 32},     {"num_attention_heads", 32},
                       {"num_key_value_heads", 8},    {"intermediate_size", 14336},
                       {"vocab_size", 32000},         {"max_position_embeddings", 32768},
                       {"num_local_experts", 8},      {"num_experts_per_tok", 2},
                       {"router_aux_loss_coef", 0.02}};

double all_parameters(const Json& config) {
  double sum = 0;
  for (const LayerWork& work : transformer_work(parse_config(config, "config.json", 512).value())) {
    sum += work.parameters;
  }
  return sum;
}

TEST(HuggingFace, ParametersAreThoseOfThePublishedModels) {
  EXPECT_EQ(all_parameters(kGpt2), 124'439'808);
  EXPECT_EQ(all_parameters(kLlama2), 6'738'415'616);
  EXPECT_EQ(all_parameters(kLlama3), 8'030'261'248);
  EXPECT_EQ(all_parameters(kMistral), 7'241'732'096);
  EXPECT_EQ(all_parameters(kQwen2), 494'032'768);
  EXPECT_EQ(all_parameters(kMixtral), 46'702'792'704);
}

TEST(HuggingFace, ReadsAFile) {
  const TempFolder folder;
  const TransformerShape shape =
      read_config(folder.write("config.json", kMixtral.dump()), 2048, 4).value();
  EXPECT_EQ(shape.experts, 8);
  EXPECT_EQ(shape.experts_per_token, 2);
  EXPECT_EQ(shape.head_size, 128);
  EXPECT_EQ(shape.tokens(), 2048 * 4);
  EXPECT_EQ(read_config(folder.path(), 2048, 4).value().experts, 8);  // of the folder
  EXPECT_NE(read_config(folder.path() / "no.json", 1).error().message.find("no.json"),
            std::string::npos);
}

TEST(HuggingFace, TheHeadSizeMayBeGiven) {
  Json config = kMistral;  // the shape of Mistral Nemo: heads narrower than hidden / heads
  config["hidden_size"] = 5120;
  config["head_dim"] = 128;
  EXPECT_EQ(parse_config(config, "c", 512).value().head_size, 128);
  config.erase("head_dim");
  EXPECT_EQ(parse_config(config, "c", 512).value().head_size, 160);
}

TEST(HuggingFace, OnlyLearnedPositionsMustBeGiven) {
  Json config = kLlama3;
  const TransformerShape given = parse_config(config, "c", 512).value();
  config.erase("max_position_embeddings");
  const TransformerShape absent = parse_config(config, "c", 512).value();
  EXPECT_EQ(absent.positions, 512);
  const Device device = find_device("h100").value();
  EXPECT_EQ(transformer_costs(absent, device).value(), transformer_costs(given, device).value());
  Json learned = kGpt2;
  learned.erase("n_positions");
  EXPECT_EQ(parse_config(learned, "c", 512).error().message, "c: /n_positions is missing");
}

TEST(HuggingFace, AbsentKeyValueHeadsAreTheLibrarys) {
  const auto kv_heads = [](Json config, bool null) {
    config["hidden_size"] = 1024;
    config["num_attention_heads"] = 16;
    config.erase("num_key_value_heads");
    if (null) config["num_key_value_heads"] = nullptr;
    return parse_config(config, "config.json", 512).value().kv_heads;
  };
  EXPECT_EQ(kv_heads(kLlama3, false), 16);
  EXPECT_EQ(kv_heads(kLlama3, true), 16);
  EXPECT_EQ(kv_heads(kMixtral, false), 8);
  EXPECT_EQ(kv_heads(kMixtral, true), 16);
}

TEST(HuggingFace, FaultsNameFileAndPointer) {
  const auto message = [](Json config, const std::string& key, const Json& value,
                          std::int64_t sequence = 512) {
    if (value.is_null())
      config.erase(key);
    else
      config[key] = value;
    return parse_config(config, "config.json", sequence).error().message;
  };
  EXPECT_EQ(message(kLlama2, "hidden_size", nullptr), "config.json: /hidden_size is missing");
  EXPECT_EQ(message(kLlama2, "hidden_size", "4096"),
            "config.json: /hidden_size is \"4096\", wanted a whole number");
  EXPECT_EQ(message(kLlama2, "num_attention_heads", 0),
            "config.json: /num_attention_heads is 0, wanted 1 to 1073741824");
  EXPECT_EQ(message(kLlama2, "num_attention_heads", 31),
            "config.json: /num_key_value_heads is 32, wanted a divisor of the 31 heads");
  EXPECT_EQ(message(kGpt2, "n_head", 7),
            "config.json: /n_head is 7, wanted a divisor of the hidden size 768, or head_dim");
  EXPECT_EQ(message(kMixtral, "num_experts_per_tok", 9),
            "config.json: /num_experts_per_tok is 9, wanted at most the 8 experts");
  EXPECT_EQ(
      message(kGpt2, "model_type", "bert"),
      "config.json: /model_type is 'bert', which is not planned by formulas (docs/costs.md lists "
      "the types; dynmo.plan in Python takes what transformers knows)");
  EXPECT_EQ(message(kGpt2, "model_type", nullptr), "config.json: /model_type is missing");
  EXPECT_EQ(
      message(kGpt2, "vocab_size", 50257, 1025),
      "config.json: /n_positions is 1024, less than the sequence of 1025 tokens that is asked "
      "for");
  EXPECT_EQ(parse_config(Json::array(), "config.json", 1).error().message,
            "config.json: / is array, wanted an object");
  EXPECT_EQ(parse_config(kGpt2, "config.json", 0).error().message,
            "model.sequence is 0, wanted 1 to 1073741824");
}

}  // namespace
}  // namespace dynmo::cost
