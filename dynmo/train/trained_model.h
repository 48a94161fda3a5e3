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
#include "dynmo/model/layer.h"
#include "dynmo/model/llama.h"

namespace dynmo::train {

struct TrainedModel {
  std::filesystem::path checkpoint;
  std::int64_t step = 0;
  std::string data;  // data.path of the run: who knows the tokenizer
  model::LlamaConfig config;
  model::Model layers;
  std::vector<model::LayerState> states;  // by LayerId
};

// `path` is a run's folder, whose newest verified checkpoint is taken, or one checkpoint's.
// kNoCheckpoint: there is none. kBadInput: a file is damaged, or not of one of our own models.
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

// Continues `prompt`; the model sees the last `config.sequence` tokens. Calls `made` with every
// token. Deterministic. kBadInput: an empty prompt, a token outside the vocabulary, options outside
// their range.
[[nodiscard]] Expected<std::vector<std::int64_t>> generate(
    const TrainedModel& model, std::vector<std::int64_t> prompt, const Sampling& sampling,
    const std::function<void(std::int64_t)>& made = {});

// The tokenizer of the run's data; `name` (open_tokenizer) is taken instead if it is not empty.
// kBadInput: the data are gone and it is not given, or its vocabulary is not the model's.
[[nodiscard]] Expected<std::unique_ptr<const data::Tokenizer>> tokenizer_of(
    const TrainedModel& model, const std::string& name);

// Writes DIRECTORY/model.safetensors and config.json, which Hugging Face's LlamaForCausalLM reads.
[[nodiscard]] Expected<void> export_hugging_face(const TrainedModel& model,
                                                 const std::filesystem::path& directory);

}  // namespace dynmo::train
