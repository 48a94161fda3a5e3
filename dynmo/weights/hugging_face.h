// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads and writes decoders in the format of Hugging Face's transformers: a folder of config.json
// and safetensors.

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

// Experts that replace every MLP. All have the same width. A token goes to the `per_token` experts
// with the highest scores, whose gates sum to 1.
struct Experts {
  std::int64_t count = 0;
  std::int64_t per_token = 0;
  friend bool operator==(const Experts&, const Experts&) = default;
};

// The model that a config.json describes.
struct HuggingFaceModel {
  model::DecoderConfig decoder = {};
  // Set for a Mixtral. Apart from them, its decoder is a Llama.
  std::optional<Experts> experts = {};
  friend bool operator==(const HuggingFaceModel&, const HuggingFaceModel&) = default;
};

// Parses a config.json of model_type llama, gpt2, mistral, mixtral or qwen2. Its longest input
// becomes `sequence`. Dropout is 0, because probabilities of dropout are no part of a model
// (left_out() returns them). Rotary positions may be scaled by `linear` or `llama3`.
//
// Fails with kBadInput, which names file, key, value and what is implemented. It refuses other
// scaling of positions, biases in Llama, sliding windows, noise of a router, other activations,
// quantization and similar features.
[[nodiscard]] Expected<HuggingFaceModel> parse_hugging_face(const Json& json,
                                                            std::string_view origin);
// Returns a line for the user with the training settings of a config.json that are not taken over,
// else "". These are its probabilities of dropout, if they are not 0.
[[nodiscard]] std::string left_out(const Json& json);
// Writes a config.json, which parse_hugging_face() reads to the same value, except for dropout.
// Experts require a Llama without biases.
[[nodiscard]] Json hugging_face_config(const HuggingFaceModel& model);

// Opens model.safetensors of a folder, or all shards that model.safetensors.index.json names. Fails
// with kBadInput.
[[nodiscard]] Expected<std::vector<checkpoint::Safetensors>> open_hugging_face(
    const std::filesystem::path& directory);

}  // namespace dynmo::weights
