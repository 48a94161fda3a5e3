// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decoders as Hugging Face's transformers keeps them: a folder of config.json and safetensors.

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/checkpoint/safetensors.h"
#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/model/decoder.h"

namespace dynmo::train {

// A config.json of model_type llama or gpt2; its longest input becomes `sequence`. Probabilities of
// dropout are no part of a model: 0 (left_out says which it has). kBadInput, naming file, key,
// value and what is implemented: rope scaling, biases in Llama, other activations, quantization and
// the like.
[[nodiscard]] Expected<model::DecoderConfig> parse_hugging_face(const Json& json,
                                                                std::string_view origin);
// What such a file says of training that is not taken over, one line for people: its probabilities
// of dropout, where they are not 0. Else "".
[[nodiscard]] std::string left_out(const Json& json);
// The other way; parse_hugging_face reads it back to the same value, but for dropout.
[[nodiscard]] Json hugging_face_config(const model::DecoderConfig& config);

// model.safetensors of a folder, or the shards that model.safetensors.index.json names: all of
// which the index names are there. kBadInput.
[[nodiscard]] Expected<std::vector<checkpoint::Safetensors>> open_hugging_face(
    const std::filesystem::path& directory);

}  // namespace dynmo::train
