// SPDX-License-Identifier: Apache-2.0
// Models that transformers saved and what it computes from them (tests/peers/make_goldens.py).
#include "dynmo/weights/hugging_face.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>

#include "dynmo/core/files.h"
#include "dynmo/weights/export.h"
#include "dynmo/weights/generate.h"
#include "dynmo/weights/model_config.h"
#include "dynmo/weights/trained_model.h"
#include "dynmo/weights/weights.h"
#include "goldens.h"
#include "tests/support/temp_folder.h"

namespace dynmo::weights {
namespace {

namespace fs = std::filesystem;
using checkpoint::Safetensors;
using checkpoint::TensorView;
using testing::kGoldens;
using testing::tensor_of;
using testing::tensors_of;

std::vector<std::int64_t> tokens_of(const TensorView& view) {
  const at::Tensor tensor = tensor_of(view, at::kLong);
  return {tensor.data_ptr<std::int64_t>(), tensor.data_ptr<std::int64_t>() + tensor.numel()};
}

class Golden : public ::testing::TestWithParam<const char*> {
 protected:
  [[nodiscard]] fs::path folder() const { return kGoldens / GetParam(); }
  [[nodiscard]] Safetensors expected() const {
    return Safetensors::open(folder() / "expected.safetensors").value();
  }
  // Logits of two inputs, and a greedy continuation.
  void check(const TrainedModel& model) const {
    const Safetensors file = expected();
    const at::Tensor ids = tensor_of(*file.find("ids"), at::kLong);
    const at::Tensor wanted = tensor_of(*file.find("logits"), at::kFloat);
    for (std::int64_t row = 0; row < ids.size(0); ++row) {
      const at::Tensor line = ids[row].contiguous();
      const auto* data = line.data_ptr<std::int64_t>();
      const auto scores = logits(model, {data, data + line.numel()});
      ASSERT_TRUE(scores.has_value()) << scores.error().message;
      EXPECT_LE((*scores - wanted[row]).abs().max().item<double>(), 1e-4) << "input " << row;
      EXPECT_GT(wanted[row].abs().max().item<double>(), 1) << "scores to compare";
    }
    const auto greedy = tokens_of(*file.find("greedy"));
    const auto made = generate(model, tokens_of(*file.find("prompt")),
                               {.tokens = static_cast<std::int64_t>(greedy.size())});
    ASSERT_TRUE(made.has_value()) << made.error().message;
    EXPECT_EQ(*made, greedy);
  }

  TempFolder scratch_;
};

TEST_P(Golden, HasTheLogitsAndTheGreedyTokensOfTransformers) {
  const auto model = open_trained(folder());
  ASSERT_TRUE(model.has_value()) << model.error().message;
  check(*model);
}

TEST_P(Golden, ImportedAndExportedIsTheSameTensorByTensor) {
  const fs::path run = scratch_.path() / "run";
  const auto imported = import_hugging_face(folder(), run);
  ASSERT_TRUE(imported.has_value()) << imported.error().message;
  const auto model = open_trained(run);
  ASSERT_TRUE(model.has_value()) << model.error().message;
  EXPECT_EQ(model->step, 0);
  check(*model);
  const fs::path out = scratch_.path() / "out";
  ASSERT_TRUE(export_hugging_face(*model, out));
  const auto before = tensors_of(folder());
  const auto after = tensors_of(out);
  ASSERT_EQ(before.size(), after.size());
  for (const auto& [name, tensor] : before) {
    ASSERT_TRUE(after.contains(name)) << name;
    EXPECT_TRUE(at::equal(tensor, after.at(name))) << name;
  }
  const auto again = open_trained(out);
  ASSERT_TRUE(again.has_value()) << again.error().message;
  EXPECT_EQ(again->config, model->config);
  EXPECT_EQ(import_hugging_face(folder(), run).error().code, ErrorCode::kBadInput);
}

INSTANTIATE_TEST_SUITE_P(Transformers, Golden,
                         ::testing::Values("gpt2-tied", "gpt2-untied-f16", "llama-tied",
                                           "llama-untied-shards", "llama-bf16", "mixtral-shards",
                                           "mixtral-fused-bf16", "llama3-scaled", "llama-linear",
                                           "qwen2", "mistral"),
                         [](const auto& test) {
                           std::string name = test.param;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

Json config_json(const char* golden) {
  return read_json(kGoldens / golden / "config.json").value();
}

std::string refusal(const char* golden, const std::string& key, const Json& value) {
  Json json = config_json(golden);
  json[key] = value;
  const auto result = parse_hugging_face(json, "config.json");
  return result ? std::string() : result.error().message;
}

TEST(HuggingFaceConfig, WhatIsNotImplementedIsRefusedByKeyAndValue) {
  EXPECT_EQ(refusal("llama-tied", "attention_bias", true),
            "config.json: /attention_bias is true, implemented is false");
  EXPECT_EQ(refusal("llama-tied", "rms_norm_eps", 0.0),
            "config.json: /rms_norm_eps is 0, wanted above 0");
  EXPECT_EQ(refusal("gpt2-tied", "layer_norm_epsilon", -1),
            "config.json: /layer_norm_epsilon is -1, wanted above 0");
  EXPECT_EQ(refusal("llama-tied", "num_hidden_layers", 1 << 29),
            "config.json: model.blocks is 536870912, wanted 1 to 100000");
  EXPECT_EQ(refusal("llama-tied", "hidden_act", "gelu"),
            "config.json: /hidden_act is \"gelu\", implemented is \"silu\"");
  EXPECT_EQ(refusal("llama-tied", "rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}),
            "config.json: /rope_scaling/type is \"dynamic\", implemented is \"default\", "
            "\"linear\", \"llama3\"");
  EXPECT_EQ(refusal("llama-tied", "rope_parameters", {{"rope_theta", 1e4}, {"rope_type", "yarn"}}),
            "config.json: /rope_parameters/rope_type is \"yarn\", implemented is \"default\", "
            "\"linear\", \"llama3\"");
  EXPECT_EQ(refusal("llama-tied", "rope_parameters", {{"rope_type", "linear"}}),
            "config.json: /rope_parameters/factor is missing");
  EXPECT_EQ(refusal("llama-tied", "rope_parameters", {{"rope_type", "default"}, {"mscale", 2}}),
            "config.json: /rope_parameters/mscale is not a known key, known are rope_theta, "
            "partial_rotary_factor, type, rope_type");
  EXPECT_EQ(refusal("qwen2", "use_sliding_window", true),
            "config.json: /use_sliding_window is true, implemented is false");
  EXPECT_EQ(refusal("mistral", "sliding_window", 4096),
            "config.json: /sliding_window is 4096, implemented is null: attention to all tokens "
            "before");
  EXPECT_EQ(refusal("llama-tied", "head_dim", 16),
            "config.json: /head_dim is 16, implemented is hidden size / heads = 32 / 4");
  Json mistral = config_json("mistral");
  mistral.erase("sliding_window");
  EXPECT_EQ(parse_hugging_face(mistral, "config.json").error().message,
            "config.json: /sliding_window is missing, implemented is null");
  Json olmo = config_json("llama-tied");
  olmo["model_type"] = "olmo2";
  olmo["architectures"] = {"Olmo2ForCausalLM"};
  EXPECT_EQ(parse_hugging_face(olmo, "config.json").error().message,
            "config.json: /model_type is \"olmo2\", implemented is \"llama\", \"gpt2\", "
            "\"mistral\", \"mixtral\", \"qwen2\"");
  EXPECT_EQ(refusal("llama-tied", "quantization_config", {{"bits", 4}}),
            "config.json: /quantization_config is given, which is not implemented");
  EXPECT_EQ(refusal("gpt2-tied", "activation_function", "relu"),
            "config.json: /activation_function is \"relu\", implemented is \"gelu_new\", "
            "\"gelu_pytorch_tanh\"");
  EXPECT_EQ(refusal("gpt2-tied", "scale_attn_by_inverse_layer_idx", true),
            "config.json: /scale_attn_by_inverse_layer_idx is true, implemented is false");
  EXPECT_EQ(refusal("gpt2-tied", "n_head", 5).substr(0, 22), "config.json: /n_head i");
}

TEST(HuggingFaceConfig, DropoutThatIsNotTakenOverIsNamed) {
  EXPECT_EQ(left_out(config_json("llama-tied")), "");  // attention_dropout is 0
  const std::string said = left_out(config_json("gpt2-tied"));
  EXPECT_TRUE(said.starts_with("its attn_pdrop = 0.1, embd_pdrop = 0.1, resid_pdrop = 0.1 is not"))
      << said;
  const TempFolder scratch;
  EXPECT_EQ(import_hugging_face(kGoldens / "gpt2-tied", scratch.path() / "run").value(), said);
  EXPECT_EQ(read_weights(kGoldens / "gpt2-tied")->left_out, said);
  EXPECT_EQ(left_out(Json::array()), "");
}

TEST(HuggingFaceConfig, BothPlacesOfTheRotaryBaseAreRead) {
  const auto theta = [](const Json& json) {
    return std::get<model::LlamaConfig>(parse_hugging_face(json, "config.json")->decoder)
        .rope.theta;
  };
  Json json = config_json("llama-tied");
  EXPECT_EQ(theta(json), 500000);
  json.erase("rope_parameters");
  EXPECT_EQ(theta(json), 10000);
  json["rope_theta"] = 20000;
  EXPECT_EQ(theta(json), 20000);
  json["rope_scaling"] = nullptr;
  EXPECT_EQ(theta(json), 20000);
}

TEST(HuggingFaceConfig, WrittenReadsBackToTheSameValue) {
  model::LlamaConfig llama;
  llama.shape.kv_heads = 2;
  llama.shape.positions = llama.shape.sequence;
  llama.rope.theta = 123456;
  llama.tied_embeddings = true;
  model::Gpt2Config gpt2;
  gpt2.shape.sequence = gpt2.shape.positions = 77;
  gpt2.norm_epsilon = 1e-3;
  gpt2.tied_embeddings = false;
  model::LlamaConfig qwen2 = llama;
  qwen2.qkv_bias = true;
  model::LlamaConfig linear = llama;
  linear.rope = {.scaling = cost::RotaryScaling::kLinear, .factor = 2.5};
  model::LlamaConfig llama3 = llama;
  llama3.rope = {.scaling = cost::RotaryScaling::kLlama3,
                 .factor = 32,
                 .low_freq_factor = 2,
                 .high_freq_factor = 8,
                 .original_positions = 64};
  for (const model::DecoderConfig& config :
       std::vector<model::DecoderConfig>{llama, gpt2, qwen2, linear, llama3}) {
    const HuggingFaceModel described{.decoder = config};
    EXPECT_EQ(parse_hugging_face(hugging_face_config(described), "config.json").value(), described);
    EXPECT_EQ(decoder_config(config_of(config), 5), config);
  }
}

TEST(HuggingFaceConfig, TrainingOnShorterInputsKeepsTheLongestInputOfALlama) {
  const Json json = config_json("llama-tied");
  config::Config config = config_of(parse_hugging_face(json, "config.json")->decoder);
  config.model.shape.sequence = 16;
  const model::DecoderConfig trained = decoder_config(config, 71);
  EXPECT_EQ(hugging_face_config({.decoder = trained})["max_position_embeddings"],
            json["max_position_embeddings"]);
  config.model.shape.positions = 0;
  EXPECT_EQ(hugging_face_config({.decoder = decoder_config(config, 71)})["max_position_embeddings"],
            16);
}

// Where the input is full, its older half is forgotten: the tokens are those of whole readings.
TEST(Generation, BeyondTheLongestInputReadsWhatIsLeft) {
  for (const char* golden : {"llama-tied", "gpt2-tied"}) {
    const TrainedModel model = open_trained(kGoldens / golden).value();
    const std::int64_t longest = model::shape_of(model.config).sequence;
    for (const std::int64_t size : {std::int64_t{3}, longest, longest + 30}) {
      std::vector<std::int64_t> text;
      for (std::int64_t i = 0; i < size; ++i) text.push_back((i * i + 3) % 61);
      Sampling sampling;
      sampling.tokens = longest + 5;
      const auto made = generate(model, text, sampling);
      ASSERT_TRUE(made) << made.error().message;
      ASSERT_EQ(std::ssize(*made), sampling.tokens);
      std::int64_t first = std::max<std::int64_t>(0, size - longest);
      for (const std::int64_t token : *made) {
        if (std::ssize(text) - first > longest) first = std::ssize(text) - (longest + 1) / 2;
        const std::vector<std::int64_t> known(text.begin() + first, text.end());
        const at::Tensor scores = logits(model, known)->select(0, std::ssize(known) - 1);
        const double best = scores.max().item<double>();
        ASSERT_NEAR(scores[token].item<double>(), best, 1e-4 * (1 + std::abs(best)))
            << golden << ", " << size << " tokens, at " << text.size();
        text.push_back(token);
      }
    }
  }
}

TEST(Generation, SaysThatTheInputWillBeFull) {
  const TrainedModel model = open_trained(kGoldens / "llama-tied").value();
  const std::int64_t longest = model::shape_of(model.config).sequence;
  Sampling sampling;
  sampling.tokens = longest - 3;
  EXPECT_EQ(check_generation(model, {1, 2, 3, 4}, sampling).value(), "");
  EXPECT_EQ(check_generation(model, {1, 2, 3, 4, 5}, sampling).value(),
            fmt::format("the model reads at most {} tokens; the prompt has 5, and up to {} are "
                        "made: when its input is full, the older half is forgotten",
                        longest, sampling.tokens));
  EXPECT_FALSE(check_generation(model, {}, sampling));
  EXPECT_FALSE(check_generation(model, {71}, sampling));
  EXPECT_FALSE(check_generation(model, {-1}, sampling));
}

// A golden whose files a test may change.
class Changed : public ::testing::Test {
 protected:
  fs::path copy(const char* golden) {
    const fs::path folder = scratch_.path() / golden;
    fs::copy(kGoldens / golden, folder, fs::copy_options::recursive);
    return folder;
  }
  // Writes the tensors of model.safetensors anew, changed.
  static void rewrite(const fs::path& folder,
                      const std::function<void(std::vector<TensorView>&)>& change) {
    const Safetensors file = Safetensors::open(folder / "model.safetensors").value();
    std::vector<TensorView> tensors = file.tensors();
    change(tensors);
    const fs::path fresh = folder / "fresh.safetensors";
    ASSERT_TRUE(checkpoint::write_safetensors(fresh, tensors));
    fs::rename(fresh, folder / "model.safetensors");
  }
  static std::string error(const fs::path& folder) {
    const auto result = read_weights(folder);
    return result ? std::string() : result.error().message;
  }
  static bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }

  TempFolder scratch_;
};

TEST_F(Changed, TensorsThatAreMissingUnknownOrOfAnotherShapeAreNamed) {
  const fs::path folder = copy("gpt2-tied");
  rewrite(folder, [](auto& tensors) {
    tensors.push_back({.name = "transformer.h.0.extra",
                       .dtype = checkpoint::DType::kF32,
                       .shape = {0},
                       .bytes = {}});
  });
  EXPECT_PRED2(contains, error(folder), "tensor 'transformer.h.0.extra' is none of the model");
  rewrite(folder, [](auto& tensors) {
    std::erase_if(tensors, [](const auto& t) { return t.name == "transformer.ln_f.bias"; });
  });
  EXPECT_PRED2(contains, error(folder), "tensor 'transformer.ln_f.bias' is missing");
  const fs::path other = copy("llama-tied");
  rewrite(other, [](auto& tensors) {
    for (auto& t : tensors) {
      if (t.name == "model.norm.weight") t.shape = {4, 8};
    }
  });
  EXPECT_PRED2(contains, error(other),
               "tensor 'model.norm.weight' has shape [4, 8], wanted [32] by its config");
}

TEST_F(Changed, WeightsThatAreNotFiniteAreRefusedByName) {
  const fs::path folder = copy("llama-tied");
  std::vector<float> values(32, 1.0F);
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    values[5] = bad;
    rewrite(folder, [&](auto& tensors) {
      for (auto& t : tensors) {
        if (t.name != "model.norm.weight") continue;
        t.dtype = checkpoint::DType::kF32;
        t.bytes = std::as_bytes(std::span(values));
      }
    });
    const std::string said =
        "tensor 'model.norm.weight' has 1 values that are NaN or Inf, the "
        "first at element 5";
    EXPECT_PRED2(contains, open_trained(folder).error().message, said);
    const fs::path run = scratch_.path() / "run";
    EXPECT_PRED2(contains, import_hugging_face(folder, run).error().message, said);
    EXPECT_FALSE(fs::exists(run));
  }
}

TEST_F(Changed, NamesAndBuffersOfOlderFilesAreUnderstood) {
  const fs::path folder = copy("gpt2-tied");
  const std::vector<float> buffer(4, 1.0F);
  rewrite(folder, [&](auto& tensors) {
    for (auto& t : tensors) t.name = t.name.substr(std::string("transformer.").size());
    tensors.push_back({.name = "h.0.attn.bias",
                       .dtype = checkpoint::DType::kF32,
                       .shape = {1, 1, 2, 2},
                       .bytes = std::as_bytes(std::span(buffer))});
  });
  EXPECT_EQ(error(folder), "");
}

// torch.compile, FSDP and DDP put parts into the names of what they wrap.
TEST_F(Changed, NamesThatWrappersMadeAreUnderstood) {
  using Rename = std::function<std::string(const std::string&)>;
  const auto inside = [](const std::string& name, const std::string& part) {
    const std::size_t at = name.rfind('.', name.rfind('.') - 1);
    return at == std::string::npos ? name : name.substr(0, at + 1) + part + name.substr(at + 1);
  };
  const std::vector<Rename> wrappers = {
      [](const std::string& name) { return "module." + name; },
      [](const std::string& name) { return "_orig_mod." + name; },
      [](const std::string& name) { return "module._orig_mod." + name; },
      [](const std::string& name) { return "_orig_mod.module." + name; },
      [&](const std::string& name) { return inside(name, "_orig_mod."); },
      [&](const std::string& name) {
        return "_fsdp_wrapped_module." + inside(name, "_checkpoint_wrapped_module.");
      }};
  for (const char* golden : {"gpt2-tied", "llama-tied", "mixtral-fused-bf16"}) {
    for (std::size_t i = 0; i < wrappers.size(); ++i) {
      const fs::path folder = copy(golden);
      rewrite(folder, [&](auto& tensors) {
        for (auto& t : tensors) t.name = wrappers[i](t.name);
      });
      EXPECT_EQ(error(folder), "") << golden << ", wrapper " << i;
      fs::remove_all(folder);
    }
  }
  const fs::path twice = copy("llama-tied");
  rewrite(twice, [](auto& tensors) {
    tensors.push_back(tensors.front());
    tensors.back().name = "module." + tensors.front().name;
  });
  EXPECT_PRED2(contains, error(twice), "are one parameter");
  EXPECT_PRED2(contains, error(twice), "'module.");
  const fs::path other = copy("llama-bf16");
  rewrite(other, [](auto& tensors) {
    for (auto& t : tensors) t.name = "base_model." + t.name;
  });
  EXPECT_PRED2(contains, error(other), "is there: wanted it without 'base_model.' in front");
}

TEST_F(Changed, ATiedPairThatDiffersIsRefusedAndOneThatIsEqualTaken) {
  const fs::path folder = copy("llama-tied");
  std::vector<float> head(71 * 32, 0.5F);
  const auto add = [&](auto& tensors) {
    tensors.push_back({.name = "lm_head.weight",
                       .dtype = checkpoint::DType::kF32,
                       .shape = {71, 32},
                       .bytes = std::as_bytes(std::span(head))});
  };
  rewrite(folder, add);
  EXPECT_PRED2(contains, error(folder), "lm_head.weight differs from model.embed_tokens.weight");
  const fs::path equal = scratch_.path() / "equal";
  fs::copy(kGoldens / "llama-tied", equal, fs::copy_options::recursive);
  rewrite(equal, [&](auto& tensors) {
    for (const auto& t : tensors) {
      if (t.name == "model.embed_tokens.weight") {
        std::memcpy(head.data(), t.bytes.data(), t.bytes.size());
      }
    }
    add(tensors);
  });
  EXPECT_EQ(error(equal), "");
}

TEST_F(Changed, AnIndexThatLeavesItsFolderOrNamesWhatIsNotThereIsRefused) {
  const fs::path folder = copy("llama-untied-shards");
  const fs::path index = folder / "model.safetensors.index.json";
  const Json good = read_json(index).value();
  const auto with = [&](const std::string& tensor, const std::string& file) {
    Json json = good;
    json["weight_map"][tensor] = file;
    std::ofstream(index) << json.dump();
    return error(folder);
  };
  EXPECT_PRED2(contains, with("lm_head.weight", "../model.safetensors"), "a file beside it");
  EXPECT_PRED2(contains, with("none", "model-00001-of-00004.safetensors"),
               "tensor 'none' is not in");
  fs::remove(index);
  EXPECT_PRED2(contains, error(folder), "has neither model.safetensors nor");
}

TEST(Weights, ARunOfAnotherDecoderMayNotStartFromThem) {
  const Weights weights = read_weights(kGoldens / "llama-tied").value();
  const auto message = [&](auto change) {
    config::Config config = config_of(weights.config);
    change(config.model);
    const auto result = check_same_decoder(weights, decoder_config(config, 5));
    if (result) return std::string();
    return result.error().message.substr(result.error().message.find("has "));
  };
  EXPECT_EQ(message([](config::Config::Model&) {}), "");
  EXPECT_EQ(message([](config::Config::Model& m) { m.shape.sequence = 9; }), "");
  EXPECT_EQ(message([](config::Config::Model& m) { m.tied_embeddings = false; }), "");
  EXPECT_EQ(message([](config::Config::Model& m) { m.shape.hidden = 64; }),
            "has model.hidden = 32, this run 64: wanted the same; set model.hidden=32");
  EXPECT_EQ(message([](config::Config::Model& m) { m.rope.theta = 10000; }),
            "has model.rope_theta = 500000, this run 10000: wanted the same; set "
            "model.rope_theta=500000");
  EXPECT_EQ(message([](config::Config::Model& m) { m.shape.vocabulary = 0; }),
            "has model.vocabulary = 71, this run 5: wanted the same; set model.vocabulary=71");
  EXPECT_EQ(message([](config::Config::Model& m) { m.family = "gpt2"; }),
            "has model.family = llama, this run gpt2: wanted the same; set model.family=llama");
  const Weights untied = read_weights(kGoldens / "llama-bf16").value();
  config::Config config = config_of(untied.config);
  config.model.tied_embeddings = true;
  EXPECT_FALSE(check_same_decoder(untied, decoder_config(config, 5)));
}

}  // namespace
}  // namespace dynmo::weights
