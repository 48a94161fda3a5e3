// SPDX-License-Identifier: Apache-2.0
// A Hugging Face folder whose weights are taken fills every layer of the model that its config
// describes. An input is three or four texts: config.json, the header of the safetensors file, the
// number of its data bytes, and, of a folder of shards, the index.
#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>

#include "dynmo/core/files.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/state_bytes.h"
#include "dynmo/weights/hugging_face.h"
#include "dynmo/weights/mixtral.h"
#include "dynmo/weights/model_config.h"
#include "dynmo/weights/weights.h"
#include "tests/fuzz/target.h"
#include "tests/support/temp_folder.h"

namespace dynmo::fuzz {
namespace {

constexpr std::string_view kBetween = "\n%%\n";
constexpr std::int64_t kMaxData = 1 << 16;
constexpr std::size_t kMaxLayers = 64;  // that are filled

std::vector<std::string_view> parts_of(std::string_view text) {
  std::vector<std::string_view> parts;
  for (std::size_t end = text.find(kBetween); end != std::string_view::npos;
       end = text.find(kBetween)) {
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + kBetween.size());
  }
  parts.push_back(text);
  return parts;
}

std::string file_of(std::string_view header, std::int64_t data) {
  std::string file;
  for (int byte = 0; byte < 8; ++byte) {
    file += static_cast<char>((header.size() >> (8 * byte)) & 0xff);
  }
  file += header;
  return file.append(static_cast<std::size_t>(std::clamp<std::int64_t>(data, 0, kMaxData)), '\0');
}

// Names and shapes of block 0's experts as the models of transformers have them.
std::vector<std::pair<std::string, std::vector<std::int64_t>>> fused(
    const cost::DecoderShape& shape, std::int64_t experts) {
  const std::string block = "model.layers.0.mlp.";
  return {{block + "gate.weight", {experts, shape.hidden}},
          {block + "experts.gate_up_proj", {experts, 2 * shape.intermediate, shape.hidden}},
          {block + "experts.down_proj", {experts, shape.hidden, shape.intermediate}}};
}

enum class Written { kOneFile, kShards, kFused };

std::string seed(const weights::HuggingFaceModel& described, Written written_as) {
  const bool shards = written_as == Written::kShards;
  const TempFolder folder;
  const model::DecoderConfig& config = described.decoder;
  const model::Recipe recipe =
      weights::shaped_recipe(config, described.experts ? weights::sources_of(*described.experts)
                                                       : dynamism::SourceOptions())
          .value();
  const std::vector<std::byte> zeros(static_cast<std::size_t>(kMaxData));
  std::vector<checkpoint::TensorView> tensors;
  Json map = Json::object();
  std::size_t data = 0;
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
    const std::size_t bytes = *checkpoint::bytes_of(checkpoint::DType::kF32, shape);
    tensors.push_back({.name = name,
                       .dtype = checkpoint::DType::kF32,
                       .shape = shape,
                       .bytes = std::span(zeros).first(bytes)});
    map[name] = "a.safetensors";
    data += bytes;
  };
  for (const auto& [place, layer] : recipe.slots) {
    for (const model::ParameterSpec& spec : layer->parameters()) {
      const std::string name = model::checkpoint_name(config, place, spec.name);
      if (spec.name == "lm_head.weight" && model::tied(config)) continue;
      const bool joined = spec.name.starts_with("block_sparse_moe");
      if (written_as != Written::kFused || !joined) add(name, spec.shape);
    }
  }
  if (written_as == Written::kFused) {
    for (const auto& [name, shape] : fused(model::shape_of(config), described.experts->count)) {
      add(name, shape);
    }
  }
  const auto path = folder.path() / "a";
  const auto written = checkpoint::write_safetensors(path, tensors);
  DYNMO_CHECK(written.has_value(), "a file, got {}", written.error().message);
  const std::string file = read_file(path).value();
  std::string text = weights::hugging_face_config(described).dump();
  text.append(kBetween).append(file.substr(8, file.size() - 8 - data));
  text.append(kBetween).append(std::to_string(data));
  if (shards) text.append(kBetween).append(Json{{"weight_map", map}}.dump());
  return text;
}

}  // namespace

Outcome run_target(std::string_view text) {
  static const TempFolder folder;
  const std::vector<std::string_view> parts = parts_of(text);
  if (parts.size() < 3) return Outcome::kRefused;
  std::int64_t data = 0;
  std::from_chars(parts[2].data(), parts[2].data() + parts[2].size(), data);
  const bool shards = parts.size() > 3;
  const char* const name = shards ? "a.safetensors" : "model.safetensors";
  for (const char* old : {"a.safetensors", "model.safetensors", "model.safetensors.index.json"}) {
    std::filesystem::remove(folder.path() / old);
  }
  folder.write("config.json", parts[0]);
  folder.write(name, file_of(parts[1], data));
  if (shards) folder.write("model.safetensors.index.json", parts[3]);

  const auto weights = weights::read_weights(folder.path());
  if (!weights) return refused(weights.error());
  const auto same = weights::check_same_decoder(*weights, weights->config);
  DYNMO_CHECK(same.has_value(), "the decoder of its own config, got {}", same.error().message);
  const model::Recipe recipe = weights::shaped_recipe(weights->config, weights->sources).value();
  for (std::size_t i = 0; i < std::min(recipe.slots.size(), kMaxLayers); ++i) {
    const auto& [place, layer] = recipe.slots[i];
    model::LayerState state =
        model::allocate_like(*layer, LayerId(static_cast<int>(i)), {.frozen = true, .pruned = {}});
    weights::load_values(*weights, place, state);
  }
  return Outcome::kTaken;
}

std::vector<std::string> seeds() {
  const model::LlamaConfig llama{.shape = {.vocabulary = 7,
                                           .hidden = 4,
                                           .blocks = 1,
                                           .heads = 2,
                                           .kv_heads = 1,
                                           .intermediate = 3,
                                           .sequence = 8}};
  const model::Gpt2Config gpt2{.shape = {.vocabulary = 7,
                                         .hidden = 4,
                                         .blocks = 1,
                                         .heads = 2,
                                         .intermediate = 3,
                                         .sequence = 8,
                                         .positions = 8}};
  const weights::HuggingFaceModel mixtral{.decoder = llama,
                                          .experts = weights::Experts{.count = 3, .per_token = 2}};
  return {seed({.decoder = llama}, Written::kOneFile), seed({.decoder = gpt2}, Written::kOneFile),
          seed({.decoder = llama}, Written::kShards), seed(mixtral, Written::kOneFile),
          seed(mixtral, Written::kFused)};
}

}  // namespace dynmo::fuzz
