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
namespace {

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
  // A model of bytes needs no file, and outlives its data.
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
       {data::kTokenizerFile, data::kTokenizerJsonFile, data::kTokenizerSettingsFile,
        "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"}) {
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
