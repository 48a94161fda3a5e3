// SPDX-License-Identifier: Apache-2.0
#pragma once

// Converts text to token ids and back. There are three kinds. Bytes need no training and no file,
// and keep the vocabulary small. SentencePiece models are trained here or elsewhere. A
// tokenizer.json of Hugging Face is read if it is a byte-level BPE.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"

namespace dynmo::data {

inline constexpr std::string_view kByteTokenizer = "bytes";
inline constexpr std::string_view kSentencePieceTokenizer = "sentencepiece";
inline constexpr std::string_view kByteLevelBpe = "byte-level-bpe";
inline constexpr std::int32_t kByteVocabulary = 257;
inline constexpr std::int32_t kByteEndOfDocument = 256;

// Converts text to tokens and back. Immutable: any number of threads may use one.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  [[nodiscard]] virtual std::string_view kind() const = 0;  // kByteTokenizer, ...
  [[nodiscard]] virtual std::int32_t vocabulary() const = 0;
  [[nodiscard]] virtual std::int32_t end_of_document() const = 0;  // below vocabulary()
  // Appends the tokens of `text`, which may have any bytes. Adds nothing before or behind it.
  virtual void encode(std::string_view text, std::vector<std::int32_t>& tokens) const = 0;
  // Returns the bytes of a token, which may be a part of a character (see WholeCharacters). Returns
  // "" for control tokens, such as the end of a document, and for ids out of range.
  [[nodiscard]] virtual std::string text_of(std::int32_t token) const = 0;
  // Returns whether encode() puts a space before a text that has none there.
  [[nodiscard]] virtual bool adds_space() const = 0;
  // Returns the content of the file from which open_tokenizer() makes this tokenizer, or "" for
  // bytes.
  [[nodiscard]] virtual std::string_view model() const = 0;
  // Returns the content of a tokenizer_config.json beside the file of model(), or "" if that file
  // needs none.
  [[nodiscard]] virtual std::string settings() const { return {}; }

 protected:
  Tokenizer() = default;
};

// Makes the tokenizer whose ids 0 to 255 are the bytes of the text. 256 ends a document.
[[nodiscard]] std::unique_ptr<const Tokenizer> make_byte_tokenizer();

// Opens the tokenizer `name`: "bytes", a SentencePiece model, a tokenizer.json, or a folder with
// one of these files. If a folder has both, dataset.json decides, or else the SentencePiece model
// is used. Returns kBadInput for anything else.
[[nodiscard]] Expected<std::unique_ptr<const Tokenizer>> open_tokenizer(const std::string& name);

// Returns the text of a whole document. It equals the text that encode() was given, if the
// tokenizer loses nothing.
[[nodiscard]] std::string decode(const Tokenizer& tokenizer, std::span<const std::int32_t> tokens);

}  // namespace dynmo::data
