// SPDX-License-Identifier: Apache-2.0
#pragma once

// A model's shape from the `config.json` that Hugging Face's transformers library keeps beside its
// weights: what users have of a model that nobody has profiled.

#include <cstdint>
#include <filesystem>
#include <string_view>

#include "dynmo/core/expected.h"
#include "dynmo/core/json.h"
#include "dynmo/cost/transformer.h"

namespace dynmo::cost {

// The families of family_table.h, and the text model of a file with several models. Keys that do
// not change the shape are passed over, there are many; null is as good as absent, and absent keys
// have the library's defaults where it has one that follows from the others. `notes` says what the
// plan leaves out: other models, multi-token prediction, quantization.
// kBadInput, one line with file and JSON pointer: a key missing, of the wrong type or below 1, an
// unknown model type, a class without a language-model head, a key that changes the shape in a way
// that is not planned, a `sequence` (tokens) longer than the model's positions.
[[nodiscard]] Expected<TransformerShape> parse_config(const Json& json, std::string_view origin,
                                                      std::int64_t sequence,
                                                      std::int64_t micro_batch_size = 1);
// `path` is the file, or a folder with a config.json. Infinity and NaN, which Python writes, are
// read as text: an error if a key that is needed has them.
[[nodiscard]] Expected<TransformerShape> read_config(const std::filesystem::path& path,
                                                     std::int64_t sequence,
                                                     std::int64_t micro_batch_size = 1);

}  // namespace dynmo::cost
