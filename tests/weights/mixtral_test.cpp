// SPDX-License-Identifier: Apache-2.0
// Mixtrals in and out, on small files that the tests write: no transformers.
#include "dynmo/weights/mixtral.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <fstream>
#include <functional>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/moe/options.h"
#include "dynmo/model/recipe.h"
#include "dynmo/weights/export.h"
#include "dynmo/weights/model_config.h"
#include "dynmo/weights/trained_model.h"
#include "dynmo/weights/weights.h"
#include "tests/support/temp_folder.h"

namespace dynmo::weights {
namespace {

namespace fs = std::filesystem;
using checkpoint::DType;
using checkpoint::Safetensors;
using checkpoint::TensorView;
using dynamism::MoeOptions;

constexpr std::int64_t kHidden = 8;
constexpr std::int64_t kInner = 6;
constexpr std::int64_t kVocabulary = 11;
constexpr int kBlocks = 2;
constexpr std::int64_t kExperts = 4;

const Json kConfig = {{"model_type", "mixtral"},
                      {"architectures", {"MixtralForCausalLM"}},
                      {"hidden_size", kHidden},
                      {"num_hidden_layers", kBlocks},
                      {"num_attention_heads", 2},
                      {"num_key_value_heads", 1},
                      {"intermediate_size", kInner},
                      {"vocab_size", kVocabulary},
                      {"max_position_embeddings", 16},
                      {"num_local_experts", kExperts},
                      {"num_experts_per_tok", 2},
                      {"rms_norm_eps", 1e-5},
                      {"rope_theta", 1e6},
                      {"hidden_act", "silu"},
                      {"sliding_window", nullptr},
                      {"router_jitter_noise", 0.0},
                      {"router_aux_loss_coef", 0.02}};

// A tensor that owns its bytes: random numbers of no special value.
struct Made {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;
};

enum class Spelling { kSeparate, kFused };

// The tensors of kConfig. Both spellings have the same bytes.
class Tensors {
 public:
  Tensors(Spelling spelling, DType dtype) : dtype_(dtype), random_(7) {
    add("model.embed_tokens.weight", {kVocabulary, kHidden});
    for (int block = 0; block < kBlocks; ++block) {
      const std::string at = "model.layers." + std::to_string(block) + ".";
      add(at + "input_layernorm.weight", {kHidden});
      add(at + "self_attn.q_proj.weight", {kHidden, kHidden});
      add(at + "self_attn.k_proj.weight", {kHidden / 2, kHidden});
      add(at + "self_attn.v_proj.weight", {kHidden / 2, kHidden});
      add(at + "self_attn.o_proj.weight", {kHidden, kHidden});
      add(at + "post_attention_layernorm.weight", {kHidden});
      const bool fused = spelling == Spelling::kFused;
      add(at + (fused ? "mlp.gate.weight" : "block_sparse_moe.gate.weight"), {kExperts, kHidden});
      std::vector<Made> up, down;
      for (std::int64_t expert = 0; expert < kExperts; ++expert) {
        const std::string name = at + "block_sparse_moe.experts." + std::to_string(expert) + ".";
        up.push_back(random(name + "w1.weight", {kInner, kHidden}));
        up.push_back(random(name + "w3.weight", {kInner, kHidden}));
        down.push_back(random(name + "w2.weight", {kHidden, kInner}));
      }
      if (fused) {
        add_joined(at + "mlp.experts.gate_up_proj", {kExperts, 2 * kInner, kHidden}, up);
        add_joined(at + "mlp.experts.down_proj", {kExperts, kHidden, kInner}, down);
      } else {
        made_.insert(made_.end(), up.begin(), up.end());
        made_.insert(made_.end(), down.begin(), down.end());
      }
    }
    add("model.norm.weight", {kHidden});
    add("lm_head.weight", {kVocabulary, kHidden});
  }

  [[nodiscard]] std::vector<TensorView> views() const {
    std::vector<TensorView> views;
    for (const Made& one : made_) {
      views.push_back({.name = one.name, .dtype = dtype_, .shape = one.shape, .bytes = one.bytes});
    }
    return views;
  }

 private:
  Made random(std::string name, std::vector<std::int64_t> shape) {
    Made made{.name = std::move(name), .shape = std::move(shape), .bytes = {}};
    std::int64_t count = 1;
    for (const std::int64_t size : made.shape) count *= size;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto value = static_cast<float>(random_.uniform() - 0.5);
      const auto bits = std::bit_cast<std::array<std::byte, 4>>(value);
      // (The upper half of an fp32 number is a bf16 one.)
      made.bytes.insert(made.bytes.end(), bits.begin() + (dtype_ == DType::kBF16 ? 2 : 0),
                        bits.end());
    }
    return made;
  }
  void add(std::string name, std::vector<std::int64_t> shape) {
    made_.push_back(random(std::move(name), std::move(shape)));
  }
  void add_joined(std::string name, std::vector<std::int64_t> shape,
                  const std::vector<Made>& parts) {
    Made made{.name = std::move(name), .shape = std::move(shape), .bytes = {}};
    for (const Made& part : parts) {
      made.bytes.insert(made.bytes.end(), part.bytes.begin(), part.bytes.end());
    }
    made_.push_back(std::move(made));
  }

  DType dtype_;
  Rng random_;
  std::vector<Made> made_;
};

// Folders of kConfig and its tensors.
class Mixtral : public ::testing::Test {
 protected:
  using Change = std::function<void(std::vector<TensorView>&)>;

  fs::path folder(const std::string& name, Spelling spelling, DType dtype = DType::kF32,
                  const Change& change = {}) {
    const Tensors tensors(spelling, dtype);
    std::vector<TensorView> views = tensors.views();
    if (change) change(views);
    const fs::path path = config_folder(name);
    EXPECT_TRUE(checkpoint::write_safetensors(path / "model.safetensors", views));
    return path;
  }
  // The same in two files with an index.
  fs::path sharded_folder(const std::string& name, Spelling spelling) {
    const Tensors tensors(spelling, DType::kF32);
    const std::vector<TensorView> views = tensors.views();
    const fs::path path = config_folder(name);
    Json map = Json::object();
    for (const std::size_t shard : {0U, 1U}) {
      const std::string file = "model-" + std::to_string(shard) + ".safetensors";
      std::vector<TensorView> part;
      for (std::size_t i = shard; i < views.size(); i += 2) {
        map[views[i].name] = file;
        part.push_back(views[i]);
      }
      EXPECT_TRUE(checkpoint::write_safetensors(path / file, part));
    }
    std::ofstream(path / "model.safetensors.index.json") << Json{{"weight_map", map}}.dump();
    return path;
  }
  [[nodiscard]] fs::path path(const std::string& name) const { return scratch_.path() / name; }

 private:
  fs::path config_folder(const std::string& name) {
    fs::create_directories(path(name));
    std::ofstream(path(name) / "config.json") << kConfig.dump();
    return path(name);
  }

  TempFolder scratch_;
};

// Names, shapes and bytes of all tensors that a folder's layers are filled with.
std::map<std::string, std::pair<std::vector<std::int64_t>, std::vector<std::byte>>> contents(
    const fs::path& folder) {
  const auto weights = read_weights(folder);
  EXPECT_TRUE(weights.has_value()) << weights.error().message;
  std::map<std::string, std::pair<std::vector<std::int64_t>, std::vector<std::byte>>> all;
  if (!weights) return all;
  for (const auto& [name, tensor] : weights->tensors) {
    all[name] = {tensor.shape, {tensor.bytes.begin(), tensor.bytes.end()}};
  }
  return all;
}

TEST_F(Mixtral, BothSpellingsOfNamesInOneFileAndInShardsAreTheSameWeights) {
  const auto separate = contents(folder("separate", Spelling::kSeparate));
  EXPECT_EQ(separate.size(), 3 + kBlocks * (7 + 3 * kExperts));
  EXPECT_EQ(contents(folder("fused", Spelling::kFused)), separate);
  EXPECT_EQ(contents(sharded_folder("shards", Spelling::kSeparate)), separate);
  EXPECT_EQ(contents(sharded_folder("fused-shards", Spelling::kFused)), separate);
  const Weights weights = read_weights(path("fused")).value();
  EXPECT_TRUE(weights.sources.enabled<MoeOptions>());
  EXPECT_EQ(weights.sources.get<MoeOptions>().experts, kExperts);
  EXPECT_EQ(weights.sources.get<MoeOptions>().top_k, 2);
}

TEST_F(Mixtral, ImportedAndExportedIsTheSameBitForBit) {
  for (const Spelling spelling : {Spelling::kSeparate, Spelling::kFused}) {
    const std::string name = spelling == Spelling::kFused ? "fused" : "separate";
    const fs::path from = folder(name, spelling);
    const auto imported = import_hugging_face(from, path(name + "-run"));
    ASSERT_TRUE(imported.has_value()) << imported.error().message;
    const auto model = open_trained(path(name + "-run"));
    ASSERT_TRUE(model.has_value()) << model.error().message;
    const auto exported = export_hugging_face(*model, path(name + "-out"));
    ASSERT_TRUE(exported.has_value()) << exported.error().message;
    // Under the names that files have.
    const Safetensors written =
        Safetensors::open(path(name + "-out") / "model.safetensors").value();
    const Tensors tensors(Spelling::kSeparate, DType::kF32);
    const std::vector<TensorView> wanted = tensors.views();
    EXPECT_EQ(written.tensors().size(), wanted.size());
    for (const TensorView& tensor : wanted) {
      const TensorView* found = written.find(tensor.name);
      ASSERT_NE(found, nullptr) << tensor.name;
      EXPECT_EQ(found->shape, tensor.shape) << tensor.name;
      EXPECT_TRUE(std::ranges::equal(found->bytes, tensor.bytes)) << tensor.name;
    }
    const Json config = read_json(path(name + "-out") / "config.json").value();
    for (const char* key : {"model_type", "architectures", "num_local_experts", "hidden_size",
                            "num_experts_per_tok", "intermediate_size", "sliding_window",
                            "rope_theta", "rms_norm_eps", "num_key_value_heads"}) {
      EXPECT_EQ(config[key], kConfig[key]) << key;
    }
    EXPECT_FALSE(config.contains("mlp_bias"));
  }
}

TEST_F(Mixtral, OfBf16FilesEveryValueIsTaken) {
  for (const Spelling spelling : {Spelling::kSeparate, Spelling::kFused}) {
    const std::string name = spelling == Spelling::kFused ? "fused" : "separate";
    const TrainedModel model = open_trained(folder(name, spelling, DType::kBF16)).value();
    const fs::path out = path(name + "-out");
    ASSERT_TRUE(export_hugging_face(model, out));
    const Safetensors written = Safetensors::open(out / "model.safetensors").value();
    const Tensors tensors(Spelling::kSeparate, DType::kBF16);
    for (const TensorView& tensor : tensors.views()) {
      const TensorView* found = written.find(tensor.name);
      ASSERT_NE(found, nullptr) << tensor.name;
      ASSERT_EQ(found->bytes.size(), 2 * tensor.bytes.size());
      for (std::size_t i = 0; i < tensor.bytes.size(); i += 2) {
        EXPECT_EQ(std::memcmp(found->bytes.data() + 2 * i + 2, tensor.bytes.data() + i, 2), 0);
        EXPECT_EQ(found->bytes[2 * i], std::byte{0});
        EXPECT_EQ(found->bytes[2 * i + 1], std::byte{0});
      }
    }
  }
}

TEST_F(Mixtral, TensorsThatDoNotFitAreNamedInOneLine) {
  int folders = 0;
  const auto said = [&](Spelling spelling, const Change& change) {
    const auto result =
        read_weights(folder("folder" + std::to_string(folders++), spelling, DType::kF32, change));
    return result ? std::string("nothing") : result.error().message;
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos && text.find('\n') == std::string::npos;
  };
  const auto shaped = [](const char* name, std::vector<std::int64_t> shape) {
    return [=](std::vector<TensorView>& tensors) {
      for (TensorView& tensor : tensors) {
        if (tensor.name == name) tensor.shape = shape;
      }
    };
  };
  const auto without = [](const char* name) {
    return [=](std::vector<TensorView>& tensors) {
      std::erase_if(tensors, [&](const TensorView& tensor) { return tensor.name == name; });
    };
  };
  const auto with = [](const char* name) {
    return [=](std::vector<TensorView>& tensors) {
      tensors.push_back({.name = name, .dtype = DType::kF32, .shape = {0}, .bytes = {}});
    };
  };
  const std::string block = "model.layers.1.";
  EXPECT_PRED2(contains,
               said(Spelling::kFused, shaped("model.layers.1.mlp.experts.gate_up_proj",
                                             {kExperts, kHidden, 2 * kInner})),
               "tensor 'model.layers.1.mlp.experts.gate_up_proj' has shape [4, 8, 12], wanted "
               "[4, 12, 8] by its config");
  EXPECT_PRED2(contains,
               said(Spelling::kFused,
                    shaped("model.layers.0.mlp.experts.down_proj", {2, 2 * kHidden, kInner})),
               "tensor 'model.layers.0.mlp.experts.down_proj' has shape [2, 16, 6], wanted "
               "[4, 8, 6] by its config");
  EXPECT_PRED2(contains, said(Spelling::kFused, without("model.layers.1.mlp.experts.down_proj")),
               "tensor 'model.layers.1.block_sparse_moe.experts.0.w2.weight' is missing");
  EXPECT_PRED2(
      contains,
      said(Spelling::kSeparate, without("model.layers.1.block_sparse_moe.experts.3.w1.weight")),
      "tensor 'model.layers.1.block_sparse_moe.experts.3.w1.weight' is missing");
  EXPECT_PRED2(contains,
               said(Spelling::kSeparate,
                    shaped("model.layers.0.block_sparse_moe.gate.weight", {kHidden, kExperts})),
               "tensor 'model.layers.0.block_sparse_moe.gate.weight' has shape [8, 4], wanted "
               "[4, 8] by its config");
  EXPECT_PRED2(
      contains,
      said(Spelling::kSeparate, with("model.layers.0.block_sparse_moe.experts.4.w1.weight")),
      "tensor 'model.layers.0.block_sparse_moe.experts.4.w1.weight' is none of the model");
  EXPECT_PRED2(contains, said(Spelling::kFused, with("model.layers.2.mlp.experts.gate_up_proj")),
               "tensor 'model.layers.2.mlp.experts.gate_up_proj' is none of the model");
  EXPECT_PRED2(contains,
               said(Spelling::kFused, with("model.layers.0.block_sparse_moe.experts.1.w3.weight")),
               "tensor 'model.layers.0.block_sparse_moe.experts.1.w3.weight' is there, and "
               "'model.layers.0.mlp.experts.gate_up_proj', too");
  EXPECT_PRED2(contains,
               said(Spelling::kFused, with("model.layers.0.block_sparse_moe.gate.weight")),
               "'model.layers.0.mlp.gate.weight', too");
  EXPECT_PRED2(contains,
               said(Spelling::kFused,
                    [&](std::vector<TensorView>& tensors) {
                      for (TensorView& tensor : tensors) {
                        if (tensor.name.ends_with("down_proj")) tensor.dtype = DType::kI32;
                      }
                    }),
               "tensor 'model.layers.0.mlp.experts.down_proj' is I32, wanted F32, F16 or BF16");
}

TEST_F(Mixtral, OfAnotherRouterOrWithACapacityIsNotExported) {
  const TrainedModel model = open_trained(folder("folder", Spelling::kSeparate)).value();
  const auto said = [&](const std::function<void(MoeOptions&)>& change) {
    TrainedModel changed = model;
    changed.checkpoint = "run";
    change(changed.sources.get<MoeOptions>());
    const auto result = export_hugging_face(changed, path("out"));
    EXPECT_FALSE(fs::exists(path("out")));
    return result ? std::string() : result.error().message;
  };
  EXPECT_EQ(said([](MoeOptions& moe) { moe.router = dynamism::MoeRouter::kBias; }),
            "'run' was trained with moe.router = 'bias', which transformers' Mixtral does not "
            "have: wanted 'top_k'");
  EXPECT_EQ(
      said([](MoeOptions& moe) { moe.router = dynamism::MoeRouter::kExpertChoice; }).substr(0, 29),
      "'run' was trained with moe.ro");
  EXPECT_EQ(said([](MoeOptions& moe) { moe.capacity_factor = 1.25; }),
            "'run' was trained with moe.capacity_factor = 1.25, which transformers' Mixtral does "
            "not have: wanted 0: no token dropped");
  EXPECT_EQ(said([](MoeOptions& moe) { moe.top_k = 1; }),
            "'run' was trained with moe.top_k = 1, which transformers' Mixtral does not have: "
            "wanted 2 or more, whose gates sum to 1");
}

TEST_F(Mixtral, WidthsOfExpertsThatAreNotTheModelsAreExportedAsTheWidth) {
  dynamism::SourceOptions sources = sources_of({.count = 8, .per_token = 2});
  model::LlamaConfig llama;
  EXPECT_EQ(exported_model(llama, sources, "run").value(),
            (HuggingFaceModel{.decoder = llama, .experts = Experts{.count = 8, .per_token = 2}}));
  sources.get<MoeOptions>().expert_hidden = 24;
  const Json json = hugging_face_config(exported_model(llama, sources, "run").value());
  EXPECT_EQ(json["intermediate_size"], 24);
  EXPECT_FALSE(exported_model(llama, dynamism::SourceOptions(), "run")->experts);
}

TEST_F(Mixtral, ARunOfOtherExpertsMayNotStartFromItsWeights) {
  const Weights weights = read_weights(folder("folder", Spelling::kFused)).value();
  const auto said = [&](const std::function<void(MoeOptions&)>& change) {
    dynamism::SourceOptions sources;
    change(sources.enable<MoeOptions>());
    const auto result = check_same_experts(weights, sources);
    if (result) return std::string();
    return result.error().message.substr(result.error().message.find("has "));
  };
  EXPECT_EQ(said([](MoeOptions& moe) { moe.experts = 4; }), "");
  EXPECT_EQ(said([](MoeOptions& moe) {
              moe.experts = 4;
              moe.router = dynamism::MoeRouter::kBias;
            }),
            "");
  EXPECT_EQ(said([](MoeOptions&) {}),
            "has moe.experts = 4, this run 8: wanted the same; set moe.experts=4");
  EXPECT_EQ(said([](MoeOptions& moe) {
              moe.experts = 4;
              moe.top_k = 3;
            }),
            "has moe.top_k = 2, this run 3: wanted the same; set moe.top_k=2");
  EXPECT_EQ(check_same_experts(weights, {}).error().message.substr(0, 1), "'");
  const Weights dense = read_weights(fs::path(GOLDENS) / "llama-tied").value();
  EXPECT_TRUE(check_same_experts(dense, {}));
  const auto refused = check_same_experts(dense, weights.sources);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("has moe.enabled = false, this run true"),
            std::string::npos)
      << refused.error().message;
}

std::string mixtral_refusal(const std::string& key, const Json& value) {
  Json json = kConfig;
  json[key] = value;
  const auto result = parse_hugging_face(json, "config.json");
  return result ? std::string() : result.error().message;
}

TEST(MixtralConfig, WhatChangesTheArithmeticIsRefusedByKeyAndValue) {
  EXPECT_EQ(mixtral_refusal("sliding_window", nullptr), "");
  EXPECT_EQ(mixtral_refusal("sliding_window", 4096),
            "config.json: /sliding_window is 4096, implemented is null: attention to all tokens "
            "before");
  EXPECT_EQ(mixtral_refusal("router_jitter_noise", 0), "");
  EXPECT_EQ(mixtral_refusal("router_jitter_noise", 0.01),
            "config.json: /router_jitter_noise is 0.01, implemented is 0.0");
  EXPECT_EQ(mixtral_refusal("hidden_act", "gelu"),
            "config.json: /hidden_act is \"gelu\", implemented is \"silu\"");
  EXPECT_EQ(mixtral_refusal("head_dim", 16),
            "config.json: /head_dim is 16, implemented is hidden size / heads = 8 / 2");
  EXPECT_EQ(mixtral_refusal("num_experts_per_tok", 5),
            "config.json: /num_experts_per_tok is 5, wanted at most the 4 experts");
  EXPECT_EQ(mixtral_refusal("num_experts_per_tok", 1),
            "config.json: /num_experts_per_tok is 1, implemented are 2 or more: the gate of one "
            "expert would be 1 whatever the router says");
  EXPECT_EQ(mixtral_refusal("num_local_experts", 1 << 20),
            "config.json: /num_local_experts is 1048576, implemented are at most 4096 in 2 "
            "blocks");
  EXPECT_EQ(mixtral_refusal("num_local_experts", 0),
            "config.json: /num_local_experts is 0, wanted 1 to 1073741824");
  EXPECT_EQ(mixtral_refusal("quantization_config", {{"bits", 4}}),
            "config.json: /quantization_config is given, which is not implemented");
}

TEST(MixtralConfig, WrittenReadsBackToTheSameValueAndAbsentKeysAreTheLibrarys) {
  const HuggingFaceModel model = parse_hugging_face(kConfig, "config.json").value();
  ASSERT_TRUE(model.experts);
  EXPECT_EQ(*model.experts, (Experts{.count = 4, .per_token = 2}));
  EXPECT_EQ(parse_hugging_face(hugging_face_config(model), "config.json").value(), model);
  Json bare = kConfig;
  for (const char* key : {"rope_theta", "rms_norm_eps", "sliding_window"}) bare.erase(key);
  EXPECT_EQ(parse_hugging_face(bare, "config.json").value(), model);
  bare["num_attention_heads"] = 8;
  bare["hidden_size"] = 16;
  bare.erase("num_key_value_heads");
  EXPECT_EQ(model::shape_of(parse_hugging_face(bare, "config.json")->decoder).kv_heads, 8);
}

}  // namespace
}  // namespace dynmo::weights
