// SPDX-License-Identifier: Apache-2.0
#include "dynmo/weights/trained_model.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <span>

#include "dynmo/checkpoint/checkpoint.h"
#include "dynmo/config/config.h"
#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/data/dataset.h"
#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/moe/options.h"
#include "dynmo/dynamism/sparse_attention/options.h"
#include "dynmo/dynamism/training/source.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/weights/hugging_face.h"
#include "dynmo/weights/mixtral.h"
#include "dynmo/weights/model_config.h"
#include "dynmo/weights/weights.h"

namespace dynmo::weights {
checkpoint::TensorView view_of(const TrainedModel& model, LayerId layer,
                               const model::Parameter& parameter) {
  return {.name = model::checkpoint_name(model.config, model.places[layer.index()], parameter.name),
          .dtype = checkpoint::DType::kF32,
          .shape = parameter.value.sizes().vec(),
          .bytes = {static_cast<const std::byte*>(parameter.value.const_data_ptr()),
                    parameter.value.nbytes()}};
}

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
    const bool mixtral = source->name() == "moe";  // exported_model() decides on it
    if (source->replaces_layers() && !mixtral) trained.own_layers = source->name();
  }
  trained.experts_choose =
      weights.sources.enabled<dynamism::MoeOptions>() &&
      weights.sources.get<dynamism::MoeOptions>().router == dynamism::MoeRouter::kExpertChoice;
  for (std::size_t i = 0; i < trained.layers.size(); ++i) {
    // (A frozen layer has values alone.)
    trained.states.push_back(model::allocate_like(*trained.layers[i], LayerId(static_cast<int>(i)),
                                                  {.frozen = true, .pruned = {}}));
    load_values(weights, trained.places[i], trained.states.back());
  }
  return trained;
}

Expected<std::unique_ptr<const data::Tokenizer>> tokenizer_of(const TrainedModel& model,
                                                              const std::string& name) {
  const std::int64_t vocabulary = model::shape_of(model.config).vocabulary;
  // The tokenizer of bytes needs no file, so it works without the data.
  std::error_code fault;
  const std::filesystem::path folder = model.data;
  const bool there =
      !model.data.empty() && (std::filesystem::exists(folder / data::kDescriptionFile, fault) ||
                              std::filesystem::exists(folder / data::kTokenizerFile, fault) ||
                              std::filesystem::exists(folder / data::kTokenizerJsonFile, fault));
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
  if (std::filesystem::exists(folder.config(), fault)) {
    return make_error(ErrorCode::kBadInput, "'{}' holds '{}': wanted a new folder", run.string(),
                      folder.config().string());
  }
  config::Config described = config_of(model.config);
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
      pending, 0, std::move(entries),
      {{"step", 0}, {"identity", checkpoint::kImportedIdentity}, {"config", config}}));
  DYNMO_TRY(write_file_durably(folder.config(), config));
  return model.left_out;
}

}  // namespace dynmo::weights
