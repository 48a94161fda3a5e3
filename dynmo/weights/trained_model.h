// SPDX-License-Identifier: Apache-2.0
#pragma once

// A trained model as a whole, in one process: what to generate text with and to hand to other
// tools.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/data/tokenizer.h"
#include "dynmo/dynamism/source_options.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/layer.h"

namespace dynmo::weights {

struct TrainedModel {
  std::filesystem::path checkpoint;
  std::int64_t step = 0;
  std::string data;  // folder that knows the tokenizer: data.path of the run, a Hugging Face one
  std::string tokenizer;           // data::tokenizer_name of that; "" where it is not known
  std::string left_out;            // of a Hugging Face config (hugging_face.h), or ""
  std::vector<std::string> notes;  // newer checkpoints passed over, and why
  model::DecoderConfig config;
  dynamism::SourceOptions sources = {};  // of its run, as far as they shape layers
  model::Model layers;
  std::vector<model::Place> places;       // by LayerId
  std::vector<model::LayerState> states;  // by LayerId; values only
  // Attention looks at pairs that a source chooses: whole texts are read for each token.
  bool sparse_attention = false;
  // Tokens leave at heads on the way: so here.
  bool early_exit = false;
  // The table of the source whose layers no other library has; empty: none, or [moe].
  std::string own_layers = {};
  bool experts_choose = false;  // tokens, also later ones (moe.router)
};

// `path` and errors are those of read_weights and check_finite (weights.h).
[[nodiscard]] Expected<TrainedModel> open_trained(const std::filesystem::path& path);

// The tokenizer of the run's data; `name` (open_tokenizer) is taken instead if it is not empty.
// kBadInput: the data are gone or have another tokenizer now, and it is not given, or its
// vocabulary is larger than the model's.
[[nodiscard]] Expected<std::unique_ptr<const data::Tokenizer>> tokenizer_of(
    const TrainedModel& model, const std::string& name);

// kBadInput unless `directory` is absent or empty.
[[nodiscard]] Expected<void> check_export_folder(const std::filesystem::path& directory);

// Writes DIRECTORY/model.safetensors and config.json, which Hugging Face's LlamaForCausalLM,
// GPT2LMHeadModel or, of a Llama with experts, MixtralForCausalLM reads. A tied pair is written
// once, under the embedding's name, as they do. kBadInput: it has no such model (mixtral.h).
// Overwriting replaces these two files, and touches nothing else in the folder.
enum class Overwrite { kNo, kYes };
[[nodiscard]] Expected<void> export_hugging_face(const TrainedModel& model,
                                                 const std::filesystem::path& directory,
                                                 Overwrite overwrite = Overwrite::kNo);

// Copies the files of the model's tokenizer there, as they lie beside its data: their names, none
// where the tokenizer is bytes. kBadInput: as tokenizer_of.
[[nodiscard]] Expected<std::vector<std::string>> export_tokenizer(
    const TrainedModel& model, const std::filesystem::path& directory);

// Writes RUN/checkpoints/step-00000000 and RUN/config.toml with the weights and the decoder of a
// Hugging Face folder: `dynmo generate` works on it, and a run starts from it with train.init. It
// has no optimizer state. Returns what of the folder's config is left out, a line for people, or
// "". kBadInput: as read_weights, or `run` has checkpoints already.
[[nodiscard]] Expected<std::string> import_hugging_face(const std::filesystem::path& directory,
                                                        const std::filesystem::path& run);

}  // namespace dynmo::weights
