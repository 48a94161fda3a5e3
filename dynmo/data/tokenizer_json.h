// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads the tokenizer.json of Hugging Face's `tokenizers`, if it is a byte-level BPE such as those
// of GPT-2, Llama 3 and Qwen. Ids equal those of that library. Its post-processor, which puts a
// beginning-of-text token before a text, is not applied.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/data/tokenizer.h"

namespace dynmo::data {

// The token that ends documents, which tokenizer.json does not name. Without `id` and `content` it
// is the added token with a usual name ("<|endoftext|>", "<|end_of_text|>", ...), or the only
// special one.
struct DocumentEnd {
  std::optional<std::int32_t> id;
  std::optional<std::string> content;
  std::string origin = {};  // file with this value
};

// Returns `eos_token` of tokenizer_config.json in `folder`, or else `eos_token_id` of config.json,
// the first of a list. Returns kBadInput if one of the files cannot be read.
[[nodiscard]] Expected<DocumentEnd> find_document_end(const std::filesystem::path& folder);

// Reads the content of a tokenizer.json. `origin` is its name for messages. Returns kBadInput, with
// name and value, for another kind of model. Other causes are a normalizer, a pre-tokenizer or a
// property of an added token that is not implemented. A file without a token that ends documents is
// refused, too.
[[nodiscard]] Expected<std::unique_ptr<const Tokenizer>> read_tokenizer_json(
    std::string content, const std::string& origin, const DocumentEnd& end);

}  // namespace dynmo::data
