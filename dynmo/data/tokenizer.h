// SPDX-License-Identifier: Apache-2.0
#pragma once

// Text to token ids and back. Two kinds: bytes, which need no training and no file and keep the
// vocabulary small, and SentencePiece models, our own or somebody else's.

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
inline constexpr std::int32_t kByteVocabulary = 257;
inline constexpr std::int32_t kByteEndOfDocument = 256;

// Immutable: any number of threads may use one.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  [[nodiscard]] virtual std::string_view kind() const = 0;  // kByteTokenizer, ...
  [[nodiscard]] virtual std::int32_t vocabulary() const = 0;
  [[nodiscard]] virtual std::int32_t end_of_document() const = 0;  // below vocabulary()
  // Appends the tokens of `text`; any bytes are text. Nothing is put before or behind it.
  virtual void encode(std::string_view text, std::vector<std::int32_t>& tokens) const = 0;
  // The bytes that a token stands for, which may be a part of a character (WholeCharacters makes
  // whole ones of them); empty for control tokens such as the end of a document, and for ids that
  // are none.
  [[nodiscard]] virtual std::string text_of(std::int32_t token) const = 0;
  // Whether encode() begins a text with a space that the text does not have.
  [[nodiscard]] virtual bool adds_space() const = 0;
  // The serialized model that read_sentence_piece() needs to make this tokenizer again; empty for
  // bytes.
  [[nodiscard]] virtual std::string_view model() const = 0;

 protected:
  Tokenizer() = default;
};

// Ids 0 to 255 are the bytes of the text, 256 ends a document.
[[nodiscard]] std::unique_ptr<const Tokenizer> make_byte_tokenizer();

// `name` is "bytes", a SentencePiece model's file (such as the tokenizer.model of a Hugging Face
// Llama), or a folder with one, such as a prepared one (without: bytes, if its dataset.json says
// so). kBadInput: none of these, or a file that is no such model.
[[nodiscard]] Expected<std::unique_ptr<const Tokenizer>> open_tokenizer(const std::string& name);

// The text of a whole document: encode() and decode() of text are the text, where the tokenizer
// loses nothing.
[[nodiscard]] std::string decode(const Tokenizer& tokenizer, std::span<const std::int32_t> tokens);

}  // namespace dynmo::data
