// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/trained_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/dataset.h"
#include "dynmo/train/checkpoints.h"
#include "dynmo/train/config.h"
#include "dynmo/train/trainer.h"

namespace dynmo::train {
namespace {

Expected<checkpoint::VerifiedCheckpoint> find_checkpoint(const std::filesystem::path& path) {
  std::error_code fault;
  if (std::filesystem::exists(path / "manifest.json", fault)) {
    auto manifest = checkpoint::verify(path);
    if (!manifest) return Error{ErrorCode::kNoCheckpoint, manifest.error().message};
    return checkpoint::VerifiedCheckpoint{.path = path, .manifest = std::move(*manifest)};
  }
  return checkpoint::newest_verified(path / "checkpoints", nullptr);
}

// The next token's scores, [vocabulary], in fp64.
std::vector<double> scores_of(const TrainedModel& model, const std::vector<std::int64_t>& tokens) {
  const auto length =
      std::min(std::ssize(tokens), static_cast<std::ptrdiff_t>(model.config.sequence));
  model::LayerContext context;
  context.training = false;
  context.tokens_BT = at::empty({1, length}, at::kLong);
  std::copy(tokens.end() - length, tokens.end(), context.tokens_BT.data_ptr<std::int64_t>());
  at::Tensor hidden;
  for (std::size_t i = 0; i + 1 < model.layers.size(); ++i) {
    hidden = model.layers[i]->forward(model.states[i], hidden, context, nullptr);
  }
  const at::Tensor last_V =
      model::llama_logits(model.config, model.states.back(), hidden.narrow(1, length - 1, 1))
          .flatten()
          .to(at::kDouble);
  return {last_V.data_ptr<double>(), last_V.data_ptr<double>() + last_V.numel()};
}

// Ties go to the lowest token.
std::int64_t likeliest(const std::vector<double>& scores) {
  return std::max_element(scores.begin(), scores.end()) - scores.begin();
}

std::int64_t draw(const std::vector<double>& scores, const Sampling& sampling, Rng& rng) {
  const double highest = *std::max_element(scores.begin(), scores.end());
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  std::vector<double> weights;
  for (const std::size_t token : order) {
    weights.push_back(std::exp((scores[token] - highest) / sampling.temperature));
  }
  const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::size_t kept = 0;
  double sum = 0;
  while (kept < weights.size() && (kept == 0 || sum < sampling.top_p * all)) sum += weights[kept++];
  double left = rng.uniform() * sum;
  std::size_t chosen = 0;
  while (chosen + 1 < kept && left >= weights[chosen]) left -= weights[chosen++];
  return static_cast<std::int64_t>(order[chosen]);
}

Expected<void> check(const TrainedModel& model, const std::vector<std::int64_t>& prompt,
                     const Sampling& sampling) {
  if (prompt.empty()) {
    return make_error(ErrorCode::kBadInput, "the prompt is empty, wanted at least one token");
  }
  for (const std::int64_t token : prompt) {
    if (token >= 0 && token < model.config.vocabulary) continue;
    return make_error(ErrorCode::kBadInput, "the prompt has token {}, wanted 0 to {}", token,
                      model.config.vocabulary - 1);
  }
  if (sampling.tokens < 0) {
    return make_error(ErrorCode::kBadInput, "{} tokens to make, wanted 0 or more", sampling.tokens);
  }
  if (!(std::isfinite(sampling.temperature) && sampling.temperature >= 0)) {
    return make_error(ErrorCode::kBadInput, "a temperature of {}, wanted 0 or more",
                      sampling.temperature);
  }
  if (!(sampling.top_p > 0 && sampling.top_p <= 1)) {
    return make_error(ErrorCode::kBadInput, "a top-p of {}, wanted above 0 and at most 1",
                      sampling.top_p);
  }
  return {};
}

// Keys of transformers' LlamaConfig.
Json hugging_face_config(const model::LlamaConfig& config) {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"vocab_size", config.vocabulary},
          {"hidden_size", config.hidden},
          {"intermediate_size", config.intermediate},
          {"num_hidden_layers", config.blocks},
          {"num_attention_heads", config.heads},
          {"num_key_value_heads", config.kv_heads},
          {"head_dim", config.head_size()},
          {"max_position_embeddings", config.sequence},
          {"rope_theta", config.rope_theta},
          {"rms_norm_eps", config.rms_epsilon},
          {"hidden_act", "silu"},
          {"tie_word_embeddings", false},
          {"attention_bias", false},
          {"mlp_bias", false},
          {"torch_dtype", "float32"}};
}

}  // namespace

Expected<TrainedModel> open_trained(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const checkpoint::VerifiedCheckpoint found, find_checkpoint(path));
  const std::string origin = (found.path / "manifest.json").string();
  JsonObject state(found.manifest.state, origin, "/state");
  TrainedModel trained{.checkpoint = found.path,
                       .step = state.integer("step"),
                       .data = {},
                       .config = {},
                       .layers = {},
                       .states = {}};
  const std::string text = state.string("config");
  for (const char* other : {"identity", "plan", "machine"}) state.ignore(other);
  DYNMO_TRY(state.finish());
  Config config;
  DYNMO_TRY(apply_text(config, text, origin));
  trained.data = config.data.path;
  DYNMO_ASSIGN(const auto embedding, checkpoint::read_layer(found, LayerId{0}));
  const auto* table = embedding.find("model.embed_tokens.weight");
  if (table == nullptr || table->shape.size() != 2) {
    return make_error(
        ErrorCode::kBadInput,
        "checkpoint '{}' has no tensor model.embed_tokens.weight: wanted a model that "
        "`dynmo train` makes of its config",
        found.path.string());
  }
  trained.config = llama_config(config, table->shape[0]);
  DYNMO_TRY(model::validate(trained.config));
  trained.layers = model::make_llama(trained.config);
  const TensorName name = [&](LayerId layer, std::string_view parameter) {
    return model::checkpoint_name(trained.config, layer, parameter);
  };
  const plan::Plan whole =
      plan::make_plan({static_cast<int>(trained.layers.size())}, schedule::ScheduleKind::k1F1B);
  const Restored restored{.checkpoint = found, .step = trained.step, .plan = whole, .notes = {}};
  DYNMO_ASSIGN(runtime::LayerStates states,
               load_states(restored, trained.layers, whole, Rank{0}, name));
  for (auto& [id, layer] : states) trained.states.push_back(std::move(layer));
  return trained;
}

Expected<std::vector<std::int64_t>> generate(const TrainedModel& model,
                                             std::vector<std::int64_t> prompt,
                                             const Sampling& sampling,
                                             const std::function<void(std::int64_t)>& made) {
  DYNMO_TRY(check(model, prompt, sampling));
  Rng rng(mix_key({sampling.seed, 0x67656e}));
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < sampling.tokens; ++i) {
    const std::vector<double> scores = scores_of(model, prompt);
    const std::int64_t token =
        sampling.temperature == 0 ? likeliest(scores) : draw(scores, sampling, rng);
    if (token == sampling.end) break;
    prompt.push_back(token);
    result.push_back(token);
    if (made) made(token);
  }
  return result;
}

Expected<std::unique_ptr<const data::Tokenizer>> tokenizer_of(const TrainedModel& model,
                                                              const std::string& name) {
  // A model of bytes needs no file, and outlives its data.
  std::error_code fault;
  const bool gone =
      name.empty() &&
      !std::filesystem::exists(std::filesystem::path(model.data) / data::kDescriptionFile, fault);
  if (gone && model.config.vocabulary == data::kByteVocabulary) return data::make_byte_tokenizer();
  if (gone) {
    return make_error(ErrorCode::kBadInput,
                      "the data '{}' that '{}' was trained on are not there to tell the tokenizer: "
                      "give it by --tokenizer",
                      model.data, model.checkpoint.string());
  }
  DYNMO_ASSIGN(auto tokenizer, data::open_tokenizer(name.empty() ? model.data : name));
  if (tokenizer->vocabulary() != model.config.vocabulary) {
    return make_error(ErrorCode::kBadInput,
                      "the tokenizer '{}' has a vocabulary of {}, wanted the {} of '{}': give that "
                      "which the model was trained with by --tokenizer",
                      name.empty() ? model.data : name, tokenizer->vocabulary(),
                      model.config.vocabulary, model.checkpoint.string());
  }
  return tokenizer;
}

Expected<void> export_hugging_face(const TrainedModel& model,
                                   const std::filesystem::path& directory) {
  DYNMO_TRY(make_directories(directory));
  std::vector<checkpoint::TensorView> tensors;
  for (const model::LayerState& state : model.states) {
    for (const model::Parameter& parameter : state.parameters) {
      tensors.push_back({.name = model::checkpoint_name(model.config, state.id, parameter.name),
                         .dtype = checkpoint::DType::kF32,
                         .shape = parameter.value.sizes().vec(),
                         .bytes = {static_cast<const std::byte*>(parameter.value.data_ptr()),
                                   parameter.value.nbytes()}});
    }
  }
  DYNMO_TRY(
      checkpoint::write_safetensors(directory / "model.safetensors", tensors, {{"format", "pt"}}));
  return write_file_durably(directory / "config.json",
                            hugging_face_config(model.config).dump(2) + "\n");
}

}  // namespace dynmo::train
