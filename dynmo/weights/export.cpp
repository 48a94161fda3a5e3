// SPDX-License-Identifier: Apache-2.0
#include "dynmo/weights/export.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <span>

#include "dynmo/core/files.h"
#include "dynmo/core/json.h"
#include "dynmo/data/dataset.h"
#include "dynmo/weights/hugging_face.h"
#include "dynmo/weights/mixtral.h"

namespace dynmo::weights {
namespace {

using checkpoint::DType;
using checkpoint::TensorView;

constexpr const char* kWhole = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kGeneration = "generation_config.json";

// Returns the fp32 tensors of every layer by full name, without the second of a tied pair.
std::vector<TensorView> exported(const TrainedModel& model) {
  const std::vector<model::Tie> ties = model::ties(model.config);
  std::vector<TensorView> tensors;
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

// Returns the tensors of each file, in their order.
std::vector<std::vector<TensorView>> shards_of(std::vector<TensorView> tensors,
                                               const ExportOptions& options) {
  std::vector<std::vector<TensorView>> shards(1);
  std::int64_t filled = 0;
  for (TensorView& tensor : tensors) {
    const auto bytes =
        static_cast<std::int64_t>(*checkpoint::bytes_of(options.dtype, tensor.shape));
    if (!shards.back().empty() && filled + bytes > options.shard_bytes.value) {
      shards.emplace_back();
      filled = 0;
    }
    filled += bytes;
    shards.back().push_back(std::move(tensor));
  }
  return shards;
}

Expected<checkpoint::WrittenFile> write_shard(const std::filesystem::path& path,
                                              std::vector<TensorView> tensors, DType dtype) {
  std::vector<at::Tensor> rounded;  // owns the bytes
  for (TensorView& tensor : tensors) {
    if (dtype == DType::kF32) break;
    auto* data = const_cast<std::byte*>(tensor.bytes.data());
    rounded.push_back(at::from_blob(data, tensor.shape, at::kFloat).to(at::kBFloat16));
    tensor.dtype = dtype;
    tensor.bytes = {static_cast<const std::byte*>(rounded.back().const_data_ptr()),
                    rounded.back().nbytes()};
  }
  return checkpoint::write_safetensors(path, tensors, {{"format", "pt"}});
}

// Removes the files of an older export that are not among the new ones, because a reader would load
// them, too.
Expected<void> remove_older(const std::filesystem::path& directory, const Json& older,
                            const std::vector<std::string>& files) {
  std::set<std::string> names = {kWhole, kIndex, kGeneration};
  const auto map = older.is_object() ? older.find("weight_map") : older.end();
  if (older.is_object() && map != older.end() && map->is_object()) {
    for (const auto& [tensor, file] : map->items()) {
      const std::string name = file.is_string() ? file.get<std::string>() : "";
      if (!name.empty() && std::filesystem::path(name).filename() == name) names.insert(name);
    }
  }
  for (const std::string& name : names) {
    if (std::ranges::find(files, name) != files.end()) continue;
    std::error_code fault;
    std::filesystem::remove(directory / name, fault);
    if (!fault) continue;
    return make_error(ErrorCode::kBadInput, "'{}': {}", (directory / name).string(),
                      fault.message());
  }
  return {};
}

}  // namespace

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

Expected<std::vector<std::string>> export_hugging_face(const TrainedModel& model,
                                                       const std::filesystem::path& directory,
                                                       const ExportOptions& options) {
  if (!model.own_layers.empty()) {
    return make_error(ErrorCode::kBadInput,
                      "'{}' was trained with {}.enabled = true, which transformers does not have: "
                      "wanted a dense model",
                      model.checkpoint.string(), model.own_layers);
  }
  DYNMO_ASSIGN(const HuggingFaceModel theirs,
               exported_model(model.config, model.sources, model.checkpoint.string()));
  if (!options.overwrite) DYNMO_TRY(check_export_folder(directory));
  DYNMO_TRY(make_directories(directory));
  Json older;  // (A damaged index names no files.)
  if (auto index = read_json(directory / kIndex)) older = *std::move(index);

  const auto shards = shards_of(exported(model), options);
  std::vector<std::string> files;
  Json map = Json::object();
  std::int64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    files.push_back(shards.size() == 1
                        ? kWhole
                        : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size()));
    DYNMO_TRY(write_shard(directory / files.back(), shards[i], options.dtype));
    for (const TensorView& tensor : shards[i]) {
      map[tensor.name] = files.back();
      total += static_cast<std::int64_t>(*checkpoint::bytes_of(options.dtype, tensor.shape));
    }
  }
  if (shards.size() > 1) {
    const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
    DYNMO_TRY(write_file_durably(directory / kIndex, index.dump(2) + "\n"));
    files.emplace_back(kIndex);
  }
  Json config = hugging_face_config(theirs);
  config["torch_dtype"] = options.dtype == DType::kF32 ? "float32" : "bfloat16";
  if (const auto tokenizer = tokenizer_of(model, "")) {
    config["eos_token_id"] = (*tokenizer)->end_of_document();
    const Json generation = {{"eos_token_id", config["eos_token_id"]}};
    DYNMO_TRY(write_file_durably(directory / kGeneration, generation.dump(2) + "\n"));
    files.emplace_back(kGeneration);
  }
  DYNMO_TRY(write_file_durably(directory / "config.json", config.dump(2) + "\n"));
  files.emplace_back("config.json");
  DYNMO_TRY(remove_older(directory, older, files));
  return files;
}

Expected<std::vector<std::string>> export_tokenizer(const TrainedModel& model,
                                                    const std::filesystem::path& directory) {
  namespace fs = std::filesystem;
  std::vector<std::string> copied;
  if (model.data.empty()) return copied;
  std::error_code fault;
  // A Hugging Face folder may have a tokenizer that we cannot read.
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

}  // namespace dynmo::weights
