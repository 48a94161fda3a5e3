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

// The token that ends documents, which tokenizer.json does not name. If neither is given, it is the
// added token called as usual ("<|endoftext|>", "<|end_of_text|>", ...), or the only special one.
struct DocumentEnd {
  std::optional<std::int32_t> id;
  std::optional<std::string> content;
  std::string origin = {};  // file that says so
};

// Returns what the files in `folder` say: `eos_token` of tokenizer_config.json, else `eos_token_id`
// of config.json, and of a list the first. Returns kBadInput if one of them cannot be read.
[[nodiscard]] Expected<DocumentEnd> find_document_end(const std::filesystem::path& folder);

// Reads the content of a tokenizer.json. `origin` is its name for messages. Returns kBadInput, with
// name and value, for another kind of model, and for a normalizer, a pre-tokenizer or a property of
// an added token that is not implemented. Also if no token is found that ends documents.
[[nodiscard]] Expected<std::unique_ptr<const Tokenizer>> read_tokenizer_json(
    std::string content, const std::string& origin, const DocumentEnd& end);

}  // namespace dynmo::data
