// SPDX-License-Identifier: Apache-2.0
#pragma once

// SentencePiece models: read, and trained from text. The source of this header is the only file
// that knows the library.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/data/tokenizer.h"

namespace dynmo::data {

// `model` is what a .model file holds; `origin` names it in messages. Documents end with the
// model's end-of-sentence token. kBadInput: not a SentencePiece model, or one without such a token.
[[nodiscard]] Expected<std::unique_ptr<const Tokenizer>> read_sentence_piece(
    std::string model, const std::string& origin);

struct SentencePieceOptions {
  std::int32_t vocabulary = 8000;  // tokens, with 3 control tokens and 256 bytes among them
  // Byte pairs: no floating-point sums, the same model on every machine. "unigram": the likeliest
  // split of a word, which takes several times as long to train.
  std::string algorithm = "bpe";
};

// Drops lines so that those left have about `max_bytes` of different words (what stands between
// spaces): training takes some 60 bytes of memory for each of them, and text without spaces is all
// different words. Which ones follows from the lines alone. Returns how many were dropped.
[[nodiscard]] std::int64_t limit_words(std::vector<std::string>& lines, std::size_t max_bytes);

// Trains a model that gives any text back as it was: no normalization, no space put in front, runs
// of spaces kept, digits one by one, a token of its own for the end of a line, and what the text
// lacks is spelt in bytes. Ids as Llama has them: 0 unknown, 1 and 2 begin and end a text.
//
// `lines` are consumed. Deterministic. Returns what a .model file holds. kBadInput: no text, an
// unknown algorithm, a vocabulary too large or too small for the text (says which would do).
[[nodiscard]] Expected<std::string> train_sentence_piece(std::vector<std::string> lines,
                                                         const SentencePieceOptions& options);

}  // namespace dynmo::data
