// SPDX-License-Identifier: Apache-2.0
#include "dynmo/weights/weights.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/config/config.h"
#include "dynmo/core/check.h"
#include "dynmo/core/json.h"
#include "dynmo/data/blend.h"
#include "dynmo/dynamism/moe/options.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/head_slice.h"
#include "dynmo/model/recipe.h"
#include "dynmo/weights/hugging_face.h"
#include "dynmo/weights/model_config.h"

namespace dynmo::weights {
namespace {

using checkpoint::DType;
using checkpoint::TensorView;

constexpr const char* kHead = "lm_head.weight";

// Returns the parameters of a decoder's layers by their full names.
std::map<std::string, model::ParameterSpec> parameters_of(const model::DecoderConfig& config,
                                                          const std::vector<model::Place>& places,
                                                          const model::Model& layers) {
  std::map<std::string, model::ParameterSpec> parameters;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    for (model::ParameterSpec& spec : layers[i]->parameters()) {
      std::string name = model::checkpoint_name(config, places[i], spec.name);
      parameters.emplace(std::move(name), std::move(spec));
    }
  }
  return parameters;
}

// Returns the size of the vocabulary. It is the number of rows of the embedding, because the data
// may be absent.
Expected<std::int64_t> vocabulary_of(const checkpoint::VerifiedCheckpoint& found) {
  DYNMO_ASSIGN(const auto file, checkpoint::read_layer(found, LayerId(0)));
  for (const char* name : {"model.embed_tokens.weight", "transformer.wte.weight"}) {
    const TensorView* table = file.find(name);
    if (table != nullptr && table->shape.size() == 2) return table->shape[0];
  }
  return make_error(ErrorCode::kBadInput,
                    "checkpoint '{}' has no embedding of a family that there is: wanted a model "
                    "that `dynmo train` makes of its config",
                    found.path.string());
}

// Returns a view of rows of a matrix.
TensorView rows_of(const TensorView& matrix, const cost::HeadRows& rows) {
  TensorView view = matrix;
  const auto whole = static_cast<std::size_t>(matrix.shape[0]);
  const std::size_t row = matrix.bytes.size() / whole;
  view.shape[0] = rows.end - rows.begin;
  view.bytes = matrix.bytes.subspan(static_cast<std::size_t>(rows.begin) * row,
                                    static_cast<std::size_t>(view.shape[0]) * row);
  return view;
}

// Returns the tensor of a parameter, which may be some rows of a matrix (head_slice.h).
std::optional<TensorView> find_tensor(const Weights& weights, const std::string& name) {
  const auto found = weights.tensors.find(name);
  if (found != weights.tensors.end()) return found->second;
  const auto part = model::parse_matrix_rows(name);
  const auto matrix = part ? weights.tensors.find(part->matrix) : weights.tensors.end();
  if (matrix == weights.tensors.end() || matrix->second.shape.size() != 2 ||
      matrix->second.shape[0] < part->rows.end) {
    return std::nullopt;
  }
  return rows_of(matrix->second, part->rows);
}

// Joins matrices that are stored in slices (head_slice.h). A matrix with missing rows stays in
// slices, which check_tensors() reports.
void join_slices(Weights& weights) {
  std::map<std::string, std::map<std::int64_t, std::pair<std::string, std::int64_t>>> slices;
  for (const auto& [name, tensor] : weights.tensors) {
    if (const auto part = model::parse_matrix_rows(name)) {
      slices[part->matrix][part->rows.begin] = {name, part->rows.end};
    }
  }
  for (const auto& [matrix, parts] : slices) {
    auto bytes = std::make_shared<std::vector<std::byte>>();
    TensorView whole;
    std::int64_t end = 0;
    for (const auto& [begin, part] : parts) {
      const TensorView& tensor = weights.tensors.at(part.first);
      if (begin != end || tensor.shape.empty() || tensor.shape[0] != part.second - begin) break;
      if (begin == 0) whole = tensor;
      bytes->insert(bytes->end(), tensor.bytes.begin(), tensor.bytes.end());
      end = part.second;
    }
    if (end == 0 || end != std::prev(parts.end())->second.second) continue;
    for (const auto& [begin, part] : parts) weights.tensors.erase(part.first);
    whole.name = matrix;
    whole.shape[0] = end;
    whole.bytes = *bytes;
    weights.tensors.emplace(matrix, whole);
    weights.joined.push_back(std::move(bytes));
  }
}

Expected<Weights> read_checkpoint(const std::filesystem::path& path) {
  std::vector<Error> passed;
  DYNMO_ASSIGN(const checkpoint::VerifiedCheckpoint found,
               checkpoint::find_checkpoint(path, &passed));
  const std::string origin = (found.path / "manifest.json").string();
  JsonObject state(found.manifest.state, origin, "/state");
  Weights weights{.origin = found.path,
                  .step = state.integer("step"),
                  .data = {},
                  .config = {},
                  .tensors = {},
                  .files = {}};
  for (const Error& error : passed) {
    weights.notes.push_back(fmt::format("passed over a damaged checkpoint: {}", error.message));
  }
  const std::string text = state.string("config");
  if (found.manifest.state.contains("tokenizer")) weights.tokenizer = state.string("tokenizer");
  for (const auto& [key, value] : found.manifest.state.items()) state.ignore(key);
  DYNMO_TRY(state.finish());
  config::Config config;
  DYNMO_TRY(apply_text(config, text, origin));
  DYNMO_TRY(validate(config));
  DYNMO_ASSIGN(const std::int64_t vocabulary, vocabulary_of(found));
  weights.config = decoder_config(config, vocabulary);
  weights.sources = config.sources;
  weights.data = config.data.path;
  if (!config.data.blend.empty()) {  // all of its folders have one tokenizer
    DYNMO_ASSIGN(const auto parts, data::parse_blend(config.data.blend));
    weights.data = parts.front().path;
  }
  for (std::size_t i = 0; i < found.manifest.files.size(); ++i) {
    DYNMO_ASSIGN(checkpoint::Safetensors file,
                 checkpoint::read_layer(found, LayerId(static_cast<int>(i))));
    for (const TensorView& tensor : file.tensors()) {
      const bool value = !tensor.name.starts_with("optimizer.") &&
                         !tensor.name.starts_with(checkpoint::kBuffer) &&
                         !tensor.name.starts_with(checkpoint::kMask);
      if (value) weights.tensors.emplace(tensor.name, tensor);
      if (tensor.name.starts_with(checkpoint::kBuffer)) {
        weights.buffers.emplace(tensor.name.substr(std::string_view(checkpoint::kBuffer).size()),
                                tensor);
      }
    }
    weights.files.push_back(std::move(file));
  }
  join_slices(weights);
  std::visit([](auto& decoder) { decoder.shape.head_slices = 1; }, weights.config);
  return weights;
}

// Returns whether a tensor is a buffer that older versions of the library saved with the weights.
bool is_buffer(cost::Family family, std::string_view name) {
  if (family == cost::Family::kLlama) return name.ends_with(".rotary_emb.inv_freq");
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

// Returns the name of a tensor without the parts that PyTorch's wrappers add: torch.compile, FSDP
// and activation checkpointing anywhere, DDP in front.
std::string unwrapped(std::string_view name) {
  std::string plain;
  bool front = true;
  while (!name.empty()) {
    const std::string_view part = name.substr(0, name.find('.'));
    const bool last = part.size() == name.size();
    name.remove_prefix(last ? part.size() : part.size() + 1);
    const bool wrapper = part == "_orig_mod" || part == "_fsdp_wrapped_module" ||
                         part == "_checkpoint_wrapped_module" || (front && part == "module");
    if (wrapper && !last) continue;
    front = false;
    plain += std::string(part) + (last ? "" : ".");
  }
  return plain;
}

// Adds a tensor of a Hugging Face file under the name that the model with a head has for it. Files
// of the decoder alone, such as the first GPT-2's, omit the beginning of the name.
Expected<void> add_tensor(TensorMap& tensors, const TensorView& tensor, cost::Family family,
                          const std::string& origin) {
  const std::string plain = unwrapped(tensor.name);
  if (is_buffer(family, plain)) return {};
  const std::string prefix = family == cost::Family::kGpt2 ? "transformer." : "model.";
  const bool bare = plain != kHead && !plain.starts_with(prefix);
  const auto [place, added] = tensors.emplace(bare ? prefix + plain : plain, tensor);
  if (added) return {};
  return make_error(ErrorCode::kBadInput,
                    "'{}': tensors '{}' and '{}' are one parameter, '{}': wanted one of them",
                    origin, place->second.name, tensor.name, place->first);
}

Expected<Weights> read_hugging_face(const std::filesystem::path& directory) {
  DYNMO_ASSIGN(const Json json, read_json(directory / "config.json"));
  Weights weights{.origin = directory,
                  .step = 0,
                  .data = directory.string(),
                  .config = {},
                  .tensors = {},
                  .files = {}};
  DYNMO_ASSIGN(const HuggingFaceModel described,
               parse_hugging_face(json, (directory / "config.json").string()));
  weights.config = described.decoder;
  weights.left_out = left_out(json);
  DYNMO_ASSIGN(weights.files, open_hugging_face(directory));
  const cost::Family family = model::family(weights.config);
  for (const checkpoint::Safetensors& file : weights.files) {
    for (const TensorView& tensor : file.tensors()) {
      DYNMO_TRY(add_tensor(weights.tensors, tensor, family, directory.string()));
    }
  }
  if (described.experts) {
    weights.sources = sources_of(*described.experts);
    DYNMO_TRY(separate_experts(weights.tensors, model::shape_of(weights.config), *described.experts,
                               directory.string()));
  }
  return weights;
}

// Adds the missing tensor of a tied pair, which files may hold once.
Expected<void> complete_tie(Weights& weights) {
  const std::vector<model::Tie> ties = model::ties(weights.config);
  if (ties.empty()) return {};
  const auto embedding = weights.tensors.find(model::checkpoint_name(
      weights.config, {.part = model::Part::kEmbedding}, ties[0].first_parameter));
  if (embedding == weights.tensors.end()) return {};  // check_tensors() reports it
  const TensorView& first = embedding->second;
  const TensorView& second = weights.tensors.emplace(kHead, first).first->second;
  if (first.dtype == second.dtype && first.shape == second.shape &&
      std::ranges::equal(first.bytes, second.bytes)) {
    return {};
  }
  return make_error(ErrorCode::kBadInput,
                    "'{}': the embeddings are tied, but {} differs from {}: wanted them equal, or "
                    "a config that says they are not tied",
                    weights.origin.string(), kHead, embedding->first);
}

// Returns a hint about a tensor that may be the missing one, because its name ends in `name`, or
// "".
std::string lookalike(const Weights& weights, const std::string& name) {
  for (const auto& [key, tensor] : weights.tensors) {
    if (!tensor.name.ends_with("." + name)) continue;
    return fmt::format("; '{}' is there: wanted it without '{}' in front", tensor.name,
                       tensor.name.substr(0, tensor.name.size() - name.size()));
  }
  return "";
}

// Checks that every parameter has a tensor of its shape, and that there are no others.
Expected<void> check_tensors(const Weights& weights) {
  model::DecoderConfig config = weights.config;
  // No parameter depends on the length, but a table of angles of that length would be made.
  if (auto* llama = std::get_if<model::LlamaConfig>(&config)) llama->shape.sequence = 1;
  DYNMO_ASSIGN(const model::Recipe recipe, shaped_recipe(config, weights.sources));
  const auto parameters = parameters_of(config, model::places_of(recipe), model::layers_of(recipe));
  const std::string origin = weights.origin.string();
  for (const auto& [name, spec] : parameters) {
    const auto found = weights.tensors.find(name);
    if (found == weights.tensors.end()) {
      return make_error(ErrorCode::kBadInput, "'{}': tensor '{}' is missing{}", origin, name,
                        lookalike(weights, name));
    }
    const TensorView& tensor = found->second;
    if (!std::ranges::equal(tensor.shape, spec.shape)) {
      return make_error(ErrorCode::kBadInput,
                        "'{}': tensor '{}' has shape [{}], wanted [{}] by its config", origin, name,
                        fmt::join(tensor.shape, ", "), fmt::join(spec.shape, ", "));
    }
    if (tensor.dtype != DType::kF32 && tensor.dtype != DType::kF16 &&
        tensor.dtype != DType::kBF16) {
      return make_error(ErrorCode::kBadInput, "'{}': tensor '{}' is {}, wanted F32, F16 or BF16",
                        origin, name, checkpoint::name(tensor.dtype));
    }
  }
  for (const auto& [name, tensor] : weights.tensors) {
    if (parameters.contains(name)) continue;
    return make_error(ErrorCode::kBadInput,
                      "'{}': tensor '{}' is none of the model that its config describes", origin,
                      name);
  }
  return {};
}

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return at::kHalf;
    case DType::kBF16:
      return at::kBFloat16;
    default:
      return at::kFloat;
  }
}

using Setting = std::pair<std::string, std::string>;  // a key and its value as TOML

// Returns the settings that decide which experts there are.
std::vector<Setting> expert_settings_of(const dynamism::SourceOptions& sources) {
  const bool enabled = sources.enabled<dynamism::MoeOptions>();
  if (!enabled) return {{"moe.enabled", "false"}};
  const auto& moe = sources.get<dynamism::MoeOptions>();
  return {{"moe.enabled", "true"},
          {"moe.experts", fmt::format("{}", moe.experts)},
          {"moe.top_k", fmt::format("{}", moe.top_k)},
          {"moe.expert_hidden", fmt::format("{}", moe.expert_hidden)}};
}

Error differs(const Weights& weights, const Setting& theirs, const std::string& ours) {
  return make_error(
      ErrorCode::kBadInput, "'{}' has {} = {}, this run {}: wanted the same; set {}={}",
      weights.origin.string(), theirs.first, theirs.second, ours, theirs.first, theirs.second);
}

}  // namespace

Expected<Weights> read_weights(const std::filesystem::path& path) {
  std::error_code fault;
  const bool hugging_face = std::filesystem::exists(path / "config.json", fault) &&
                            !std::filesystem::exists(path / "manifest.json", fault);
  DYNMO_ASSIGN(Weights weights, hugging_face ? read_hugging_face(path) : read_checkpoint(path));
  DYNMO_TRY(model::validate(weights.config));
  DYNMO_TRY(complete_tie(weights));
  DYNMO_TRY(check_tensors(weights));
  return weights;
}

Expected<void> check_same_decoder(const Weights& weights, const model::DecoderConfig& config) {
  const auto theirs = settings_of(weights.config);
  const auto ours = settings_of(config);
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    // (The families' keys differ only at the end. `family` comes before them.)
    if (ours[i] != theirs[i]) return differs(weights, theirs[i], ours[i].second);
  }
  if (model::tied(config) && !model::tied(weights.config)) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' has two matrices for embedding and head, this run one: wanted the "
                      "same; set model.tied_embeddings=false",
                      weights.origin.string());
  }
  return {};
}

Expected<void> check_same_experts(const Weights& weights, const dynamism::SourceOptions& sources) {
  const auto theirs = expert_settings_of(weights.sources);
  const auto ours = expert_settings_of(sources);
  for (std::size_t i = 0; i < std::min(theirs.size(), ours.size()); ++i) {
    if (ours[i] != theirs[i]) return differs(weights, theirs[i], ours[i].second);
  }
  return {};
}

Expected<model::Recipe> shaped_recipe(const model::DecoderConfig& config,
                                      const dynamism::SourceOptions& sources) {
  model::Recipe recipe = model::make_recipe(config);
  DYNMO_TRY(dynamism::replace_layers(dynamism::make_sources(sources)(1), recipe));
  return recipe;
}

Expected<void> check_same_layers(const Weights& weights, const std::vector<model::Place>& places,
                                 const model::Model& layers) {
  for (const auto& [name, spec] : parameters_of(weights.config, places, layers)) {
    const auto found = find_tensor(weights, name);
    if (found && std::ranges::equal(found->shape, spec.shape)) continue;
    return make_error(
        ErrorCode::kBadInput,
        "'{}' has no tensor '{}' of shape [{}]: wanted weights of a run with the same "
        "sparse_attention.enabled, sparse_attention.rule, early_exit.* and mixture_of_depths.*",
        weights.origin.string(), name, fmt::join(spec.shape, ", "));
  }
  return {};
}

Expected<void> check_finite(const Weights& weights) {
  for (const auto& [name, tensor] : weights.tensors) {
    const auto found = checkpoint::find_not_finite(tensor);
    if (!found) continue;
    return make_error(ErrorCode::kBadInput,
                      "'{}': tensor '{}' has {} values that are NaN or Inf, the first at element "
                      "{}: wanted finite weights, such as those of an earlier checkpoint",
                      weights.origin.string(), name, found->count, found->first);
  }
  return {};
}

void load_values(const Weights& weights, const model::Place& place, model::LayerState& state) {
  for (model::Parameter& parameter : state.parameters) {
    const std::string name = model::checkpoint_name(weights.config, place, parameter.name);
    const auto found = find_tensor(weights, name);
    DYNMO_CHECK(found.has_value(), "a tensor '{}'", name);
    const TensorView& tensor = *found;
    // Copies the data through a separate tensor, because bytes in a file of other programs need not
    // be aligned.
    at::Tensor stored = at::empty(parameter.value.sizes(), scalar_type(tensor.dtype));
    DYNMO_CHECK(stored.nbytes() == tensor.bytes.size(), "{} bytes of '{}', got {}", stored.nbytes(),
                name, tensor.bytes.size());
    std::memcpy(stored.data_ptr(), tensor.bytes.data(), tensor.bytes.size());
    parameter.value.copy_(stored);
  }
  for (model::Buffer& buffer : state.buffers) {
    const auto found =
        weights.buffers.find(model::checkpoint_name(weights.config, place, buffer.name));
    if (found == weights.buffers.end() || found->second.bytes.size() != buffer.value.nbytes()) {
      continue;
    }
    std::memcpy(buffer.value.data_ptr(), found->second.bytes.data(), buffer.value.nbytes());
  }
}

}  // namespace dynmo::weights
