// SPDX-License-Identifier: Apache-2.0
#pragma once

// A model's shape from the `config.json` that Hugging Face's transformers library keeps beside its
// weights. Users have it even if a model was never profiled.

#include <cstdint>
#include <filesystem>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/transformer.h"

namespace dynmo::cost {

// Reads a config of the families of family_table.h, also the text model of a file with several
// models. Keys that do not change the shape are ignored, because there are many. Null means absent.
// Absent keys have the library's defaults, if those follow from other keys. `notes` lists what the
// plan omits: other models, multi-token prediction, quantization.
//
// Returns kBadInput, one line with file and JSON pointer. Causes are a key that is missing, of the
// wrong type or below 1, and an unknown model type. Others are a class without a language-model
// head, and a key that changes the shape in an unsupported way. `sequence` (tokens) must not exceed
// the model's positions.
[[nodiscard]] Expected<TransformerShape> parse_config(const Json& json, std::string_view origin,
                                                      std::int64_t sequence,
                                                      std::int64_t micro_batch_size = 1);
// Reads `path`, the file or a folder with a config.json. Infinity and NaN, which Python writes, are
// read as text. They are an error in a required key. Returns the errors of parse_config(), and
// kBadInput if the file cannot be read or is not JSON.
[[nodiscard]] Expected<TransformerShape> read_config(const std::filesystem::path& path,
                                                     std::int64_t sequence,
                                                     std::int64_t micro_batch_size = 1);

}  // namespace dynmo::cost
