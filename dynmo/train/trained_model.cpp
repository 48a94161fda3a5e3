// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/trained_model.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/core/rng.h"
#include "dynmo/data/dataset.h"
#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/moe/options.h"
#include "dynmo/dynamism/sparse_attention/options.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/key_value_cache.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/train/checkpoints.h"
#include "dynmo/train/config.h"
#include "dynmo/train/hugging_face.h"
#include "dynmo/train/mixtral.h"
#include "dynmo/train/model_config.h"
#include "dynmo/train/weights.h"

namespace dynmo::train {
namespace {

// Scores before softmax, [rows, vocabulary], of the last token or of all; of tokens that follow
// those in the cache; where there is none, of all. They are at most the model's longest input.
enum class Scored { kLast, kAll };
at::Tensor scores_of(const TrainedModel& model, std::span<const std::int64_t> tokens,
                     model::KeyValueCache* cache, Scored scored) {
  const auto length = static_cast<std::int64_t>(tokens.size());
  const std::int64_t first = scored == Scored::kLast ? length - 1 : 0;
  model::LayerContext context;
  context.pass = model::Pass::kGeneration;
  context.tokens_BT = at::empty({1, length}, at::kLong);
  context.cache = cache;
  context.sequences = 1;
  context.sequence_length = length;
  std::ranges::copy(tokens, context.tokens_BT.data_ptr<std::int64_t>());
  at::Tensor scores_NV;  // where some tokens left before the head
  const auto take = [&](const at::Tensor& rows, const at::Tensor& given) {
    if (!scores_NV.defined()) {
      scores_NV = at::empty({length - first, given.size(1)}, given.options());
    }
    const at::Tensor places = rows.to(at::kLong).sub(first);
    const at::Tensor wanted = places.ge(0);
    scores_NV.index_copy_(0, places.masked_select(wanted),
                          given.index_select(0, wanted.nonzero().flatten()));
  };
  model::Hidden hidden;
  for (std::size_t i = 0; i + 1 < model.layers.size(); ++i) {
    model::Output output = model.layers[i]->forward(model.states[i], hidden, context, nullptr);
    hidden = std::move(output.hidden);
    if (output.left_rows.defined()) take(output.left_rows, output.left_scores);
    // The last token has left: nothing is asked of the others.
    const bool gone = hidden.rows.defined() &&
                      (hidden.rows.numel() == 0 ||
                       hidden.rows[hidden.rows.numel() - 1].item<std::int32_t>() < length - 1);
    if (scored == Scored::kLast && gone) return scores_NV;
  }
  if (cache != nullptr) cache->advance(length);
  at::Tensor x_BTD = hidden.rows.defined() ? hidden.x.unsqueeze(0) : hidden.x;
  if (scored == Scored::kLast) x_BTD = x_BTD.narrow(1, x_BTD.size(1) - 1, 1);
  const at::Tensor last_NV = model::logits(model.config, model.states.back(), x_BTD).squeeze(0);
  if (!hidden.rows.defined() || scored == Scored::kLast) return last_NV;
  take(hidden.rows, last_NV);
  return scores_NV;
}

// Reads a text that grows, each token once while the model's input has room; the whole text for
// every token where attention takes no cache.
class Reader {
 public:
  explicit Reader(const TrainedModel& model)
      : model_(model), longest_(model::shape_of(model.config).sequence), cache_(longest_) {}

  // The next token's scores, [vocabulary], in fp64. `tokens` are those of the last call and more.
  std::vector<double> scores_of(std::span<const std::int64_t> tokens) {
    const std::int64_t size = std::ssize(tokens);
    if (size - first_ > longest_) {
      first_ = size - (started_ ? (longest_ + 1) / 2 : longest_);
      cache_.clear();
    }
    started_ = true;
    const auto read = static_cast<std::size_t>(first_ + cache_.tokens());
    const bool whole = model_.sparse_attention || model_.early_exit;
    const at::Tensor last_V =
        train::scores_of(model_, tokens.subspan(read), whole ? nullptr : &cache_, Scored::kLast)
            .flatten()
            .to(at::kDouble);
    return {last_V.data_ptr<double>(), last_V.data_ptr<double>() + last_V.numel()};
  }

 private:
  const TrainedModel& model_;
  const std::int64_t longest_;
  bool started_ = false;
  std::int64_t first_ = 0;  // of the text's tokens that the model still knows
  model::KeyValueCache cache_;
};

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

Expected<void> check_tokens(const TrainedModel& model, const std::vector<std::int64_t>& tokens) {
  if (tokens.empty()) {
    return make_error(ErrorCode::kBadInput, "the prompt is empty, wanted at least one token");
  }
  const std::int64_t vocabulary = model::shape_of(model.config).vocabulary;
  for (const std::int64_t token : tokens) {
    if (token >= 0 && token < vocabulary) continue;
    return make_error(ErrorCode::kBadInput, "the prompt has token {}, wanted 0 to {}", token,
                      vocabulary - 1);
  }
  return {};
}

Expected<void> check_sampling(const Sampling& sampling) {
  constexpr std::int64_t kMaxTokens = std::int64_t{1} << 24;
  if (sampling.tokens < 0 || sampling.tokens > kMaxTokens) {
    return make_error(ErrorCode::kBadInput, "{} tokens to make, wanted 0 to {}", sampling.tokens,
                      kMaxTokens);
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

checkpoint::TensorView view_of(const TrainedModel& model, LayerId layer,
                               const model::Parameter& parameter) {
  return {.name = model::checkpoint_name(model.config, model.places[layer.index()], parameter.name),
          .dtype = checkpoint::DType::kF32,
          .shape = parameter.value.sizes().vec(),
          .bytes = {static_cast<const std::byte*>(parameter.value.const_data_ptr()),
                    parameter.value.nbytes()}};
}

// fp32 tensors by full name, of every layer; not the second of a tied pair.
std::vector<checkpoint::TensorView> exported(const TrainedModel& model) {
  const std::vector<model::Tie> ties = model::ties(model.config);
  std::vector<checkpoint::TensorView> tensors;
  for (const model::LayerState& state : model.states) {
    for (const model::Parameter& parameter : state.parameters) {
      const bool second = std::ranges::any_of(ties, [&](const model::Tie& tie) {
        return tie.second == state.id && tie.second_parameter == parameter.name;
      });
      if (second) continue;
      tensors.push_back(view_of(model, state.id, parameter));
    }
  }
  return tensors;
}

}  // namespace

Expected<TrainedModel> open_trained(const std::filesystem::path& path) {
  DYNMO_ASSIGN(const Weights weights, read_weights(path));
  DYNMO_TRY(check_finite(weights));
  DYNMO_ASSIGN(model::Recipe recipe, shaped_recipe(weights.config, weights.sources));
  TrainedModel trained{.checkpoint = weights.origin,
                       .step = weights.step,
                       .data = weights.data,
                       .tokenizer = weights.tokenizer,
                       .left_out = weights.left_out,
                       .notes = weights.notes,
                       .config = weights.config,
                       .sources = weights.sources,
                       .layers = {},
                       .places = model::places_of(recipe),
                       .states = {}};
  trained.layers = model::layers_of(std::move(recipe));
  trained.sparse_attention = weights.sources.enabled<dynamism::SparseAttentionOptions>();
  trained.early_exit = weights.sources.enabled<dynamism::EarlyExitOptions>();
  for (const auto& source : dynamism::make_sources(weights.sources)(1)) {
    const bool mixtral = source->name() == "moe";  // which exported_model looks at
    if (source->replaces_layers() && !mixtral) trained.own_layers = source->name();
  }
  trained.experts_choose =
      weights.sources.enabled<dynamism::MoeOptions>() &&
      weights.sources.get<dynamism::MoeOptions>().router == dynamism::MoeRouting::kExpertChoice;
  for (std::size_t i = 0; i < trained.layers.size(); ++i) {
    // (A frozen layer has values alone.)
    trained.states.push_back(model::allocate_like(*trained.layers[i], LayerId(static_cast<int>(i)),
                                                  {.frozen = true, .pruned = {}}));
    load_values(weights, trained.places[i], trained.states.back());
  }
  return trained;
}

Expected<at::Tensor> logits(const TrainedModel& model, const std::vector<std::int64_t>& tokens) {
  DYNMO_TRY(check_tokens(model, tokens));
  const std::int64_t longest = model::shape_of(model.config).sequence;
  if (std::ssize(tokens) > longest) {
    return make_error(ErrorCode::kBadInput, "{} tokens, wanted at most the model's {}",
                      tokens.size(), longest);
  }
  return scores_of(model, tokens, nullptr, Scored::kAll);
}

Expected<std::string> check_generation(const TrainedModel& model,
                                       const std::vector<std::int64_t>& prompt,
                                       const Sampling& sampling) {
  DYNMO_TRY(check_tokens(model, prompt));
  DYNMO_TRY(check_sampling(sampling));
  if (model.experts_choose) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' was trained with moe.router = \"expert_choice\", whose experts choose "
                      "among tokens that are not there yet: wanted a router by which tokens choose",
                      model.checkpoint.string());
  }
  const std::int64_t longest = model::shape_of(model.config).sequence;
  // The last token is made of those before it.
  if (std::ssize(prompt) + sampling.tokens - 1 <= longest) return std::string();
  return fmt::format(
      "the model reads at most {} tokens; the prompt has {}, and up to {} are made: when its input "
      "is full, the older half is forgotten",
      longest, prompt.size(), sampling.tokens);
}

Expected<std::vector<std::int64_t>> generate(const TrainedModel& model,
                                             std::vector<std::int64_t> prompt,
                                             const Sampling& sampling,
                                             const std::function<void(std::int64_t)>& made) {
  DYNMO_TRY(check_generation(model, prompt, sampling));
  Rng rng(mix_key({sampling.seed, 0x67656e}));
  Reader reader(model);
  std::vector<std::int64_t> result;
  for (std::int64_t i = 0; i < sampling.tokens; ++i) {
    const std::vector<double> scores = reader.scores_of(prompt);
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
  const std::int64_t vocabulary = model::shape_of(model.config).vocabulary;
  // A model of bytes needs no file, and outlives its data.
  std::error_code fault;
  const std::filesystem::path folder = model.data;
  const bool there =
      !model.data.empty() && (std::filesystem::exists(folder / data::kDescriptionFile, fault) ||
                              std::filesystem::exists(folder / data::kTokenizerFile, fault));
  const bool gone = name.empty() && !there;
  if (gone && vocabulary == data::kByteVocabulary) return data::make_byte_tokenizer();
  if (gone) {
    return make_error(ErrorCode::kBadInput,
                      "the data '{}' that '{}' was trained on are not there to tell the tokenizer: "
                      "wanted its name",
                      model.data, model.checkpoint.string());
  }
  DYNMO_ASSIGN(auto tokenizer, data::open_tokenizer(name.empty() ? model.data : name));
  const bool known = name.empty() && !model.tokenizer.empty();
  if (known && data::tokenizer_name(*tokenizer) != model.tokenizer) {
    return make_error(ErrorCode::kBadInput,
                      "the data '{}' have another tokenizer now than '{}' was trained with: "
                      "prepare them as they were, or name the tokenizer",
                      model.data, model.checkpoint.string());
  }
  if (tokenizer->vocabulary() > vocabulary) {
    return make_error(
        ErrorCode::kBadInput,
        "the tokenizer '{}' has a vocabulary of {}, wanted at most the {} of '{}': name "
        "the one that the model was trained with",
        name.empty() ? model.data : name, tokenizer->vocabulary(), vocabulary,
        model.checkpoint.string());
  }
  return tokenizer;
}

Expected<void> check_export_folder(const std::filesystem::path& directory) {
  namespace fs = std::filesystem;
  std::error_code fault;
  std::vector<std::string> names;
  for (fs::directory_iterator next(directory, fault); !fault && next != fs::directory_iterator();
       next.increment(fault)) {
    names.push_back(next->path().filename().string());
  }
  if (names.empty()) return {};
  std::ranges::sort(names);
  const std::size_t shown = std::min<std::size_t>(names.size(), 3);
  return make_error(ErrorCode::kBadInput,
                    "'{}' is there and holds {}{}: wanted a new or empty folder, or to be told to "
                    "overwrite the files of a model in it",
                    directory.string(), fmt::join(std::span(names).first(shown), ", "),
                    names.size() > shown ? fmt::format(" and {} more", names.size() - shown) : "");
}

Expected<void> export_hugging_face(const TrainedModel& model,
                                   const std::filesystem::path& directory, Overwrite overwrite) {
  if (!model.own_layers.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' was trained with {}.enabled = true, which transformers does not have: "
                      "wanted a dense model",
                      model.checkpoint.string(), model.own_layers);
  }
  DYNMO_ASSIGN(const HuggingFaceModel theirs,
               exported_model(model.config, model.sources, model.checkpoint.string()));
  if (overwrite == Overwrite::kNo) DYNMO_TRY(check_export_folder(directory));
  DYNMO_TRY(make_directories(directory));
  DYNMO_TRY(checkpoint::write_safetensors(directory / "model.safetensors", exported(model),
                                          {{"format", "pt"}}));
  return write_file_durably(directory / "config.json", hugging_face_config(theirs).dump(2) + "\n");
}

Expected<std::vector<std::string>> export_tokenizer(const TrainedModel& model,
                                                    const std::filesystem::path& directory) {
  namespace fs = std::filesystem;
  std::vector<std::string> copied;
  if (model.data.empty()) return copied;
  std::error_code fault;
  // A Hugging Face folder may have one that we cannot read.
  if (fs::exists(fs::path(model.data) / data::kTokenizerFile, fault) ||
      fs::exists(fs::path(model.data) / data::kDescriptionFile, fault) ||
      !model.tokenizer.empty()) {
    DYNMO_TRY(tokenizer_of(model, ""));
  }
  for (const char* name :
       {data::kTokenizerFile, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "vocab.json", "merges.txt"}) {
    const fs::path from = fs::path(model.data) / name;
    if (!fs::is_regular_file(from, fault) || is_same_file(from, directory / name)) continue;
    DYNMO_ASSIGN(const std::string content, read_file(from));
    DYNMO_TRY(write_file_durably(directory / name, content));
    copied.emplace_back(name);
  }
  return copied;
}

Expected<std::string> import_hugging_face(const std::filesystem::path& directory,
                                          const std::filesystem::path& run) {
  std::error_code fault;
  if (!std::filesystem::exists(directory / "config.json", fault)) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' has no config.json: wanted a folder that transformers' "
                      "save_pretrained writes",
                      directory.string());
  }
  DYNMO_ASSIGN(const TrainedModel model, open_trained(directory));
  const observe::RunFolder folder(run);
  const std::filesystem::path root = folder.checkpoints();
  DYNMO_ASSIGN(const auto there, checkpoint::list_checkpoints(root));
  if (!there.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' has checkpoints already, the newest of step {}: wanted a new folder",
                      run.string(), there.front().step);
  }
  Config described = config_of(model.config);
  described.sources = model.sources;
  const std::string config = to_toml(described);
  DYNMO_TRY(make_directories(root));
  DYNMO_ASSIGN(const std::filesystem::path pending, checkpoint::begin_checkpoint(root, 0));
  std::vector<checkpoint::FileEntry> entries;
  for (const model::LayerState& state : model.states) {
    checkpoint::LayerFile file{.layer = state.id, .tensors = {}, .metadata = {}};
    for (const model::Parameter& parameter : state.parameters) {
      file.tensors.push_back(view_of(model, state.id, parameter));
    }
    DYNMO_ASSIGN(checkpoint::FileEntry entry, checkpoint::write_layer(pending, file));
    entries.push_back(std::move(entry));
  }
  DYNMO_TRY(checkpoint::commit_checkpoint(
      root, 0, std::move(entries),
      {{"step", 0}, {"identity", kImportedIdentity}, {"config", config}}));
  DYNMO_TRY(write_file_durably(folder.config(), config));
  return model.left_out;
}

}  // namespace dynmo::train
