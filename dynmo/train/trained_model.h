// SPDX-License-Identifier: Apache-2.0
#pragma once

// A trained model as a whole, in one process: what to generate text with and to hand to other
// tools.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/data/tokenizer.h"
#include "dynmo/dynamism/source_options.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/layer.h"

namespace dynmo::train {

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

struct Sampling {
  std::int64_t tokens = 200;  // made at most
  // 0: greedy, the likeliest token each time. Otherwise scores are divided by it before softmax.
  double temperature = 0;
  // Draws from the least set of likeliest tokens whose probabilities sum to it (Holtzman et al.,
  // "The curious case of neural text degeneration", 2020); in (0, 1].
  double top_p = 1;
  std::uint64_t seed = 1;
  std::int64_t end = -1;  // a token that ends the text; -1: none does
};

// Scores before softmax of every token that may follow each of `tokens`, [T, vocabulary].
// kBadInput: none or more than the model's longest input, a token outside the vocabulary.
[[nodiscard]] Expected<at::Tensor> logits(const TrainedModel& model,
                                          const std::vector<std::int64_t>& tokens);

// What generate() refuses, before anything is made. Returns a line for people where the text may
// become longer than the model's longest input, else "".
[[nodiscard]] Expected<std::string> check_generation(const TrainedModel& model,
                                                     const std::vector<std::int64_t>& prompt,
                                                     const Sampling& sampling);

// Continues `prompt`, token by token; keys and values of what the model has read are kept. Of a
// prompt longer than the model's longest input the last tokens are read. Where the input is full,
// its older half is forgotten and the rest read again, so that a token costs the same however long
// the text is. Calls `made` with every
// token. Deterministic. kBadInput: an empty prompt, a token outside the vocabulary, options outside
// their range.
[[nodiscard]] Expected<std::vector<std::int64_t>> generate(
    const TrainedModel& model, std::vector<std::int64_t> prompt, const Sampling& sampling,
    const std::function<void(std::int64_t)>& made = {});

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

}  // namespace dynmo::train
