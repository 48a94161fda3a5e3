// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decoders as Hugging Face's transformers keeps them: a folder of config.json and safetensors.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/model/decoder.h"

namespace dynmo::weights {

// Experts in the place of every MLP, of the same width each, and those of a token: the likeliest by
// softmax, whose gates sum to 1.
struct Experts {
  std::int64_t count = 0;
  std::int64_t per_token = 0;
  friend bool operator==(const Experts&, const Experts&) = default;
};

// The model that a config.json describes.
struct HuggingFaceModel {
  model::DecoderConfig decoder = {};
  std::optional<Experts> experts = {};  // of a Mixtral, whose decoder is a Llama but for them
  friend bool operator==(const HuggingFaceModel&, const HuggingFaceModel&) = default;
};

// A config.json of model_type llama, gpt2 or mixtral; its longest input becomes `sequence`.
// Probabilities of dropout are no part of a model: 0 (left_out says which it has). kBadInput,
// naming file, key, value and what is implemented: rope scaling, biases in Llama, sliding windows,
// noise of a router, other activations, quantization and the like.
[[nodiscard]] Expected<HuggingFaceModel> parse_hugging_face(const Json& json,
                                                            std::string_view origin);
// Names the settings of training in such a file that are not taken over, one line for people: its
// probabilities of dropout, where they are not 0. Else "".
[[nodiscard]] std::string left_out(const Json& json);
// The other way; parse_hugging_face reads it back to the same value, but for dropout. Experts
// require a Llama.
[[nodiscard]] Json hugging_face_config(const HuggingFaceModel& model);

// model.safetensors of a folder, or the shards that model.safetensors.index.json names: all of
// which the index names are there. kBadInput.
[[nodiscard]] Expected<std::vector<checkpoint::Safetensors>> open_hugging_face(
    const std::filesystem::path& directory);

}  // namespace dynmo::weights
