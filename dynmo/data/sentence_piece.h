// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads SentencePiece models, and trains them from text. The source of this header is the only file
// that knows the library.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/data/tokenizer.h"

namespace dynmo::data {

// Reads the content of a .model file. `origin` is its name for messages. Documents end with the
// model's end-of-sentence token. Returns kBadInput if `model` is not a SentencePiece model, or has
// no such token.
[[nodiscard]] Expected<std::unique_ptr<const Tokenizer>> read_sentence_piece(
    std::string model, const std::string& origin);

struct SentencePieceOptions {
  std::int32_t vocabulary = 8000;  // tokens, with 3 control tokens and 256 bytes among them
  // "bpe" is byte pairs: no floating-point sums, so the same model on every machine. "unigram" is
  // the likeliest split of a word, which takes several times as long to train.
  std::string algorithm = "bpe";
};

// Drops lines until about `max_bytes` of different words are left. A word is the text between
// spaces. Training takes some 60 bytes of memory for each such byte, and in text without spaces all
// words differ. The choice follows from the lines alone. Returns the number of dropped lines.
[[nodiscard]] std::int64_t limit_words(std::vector<std::string>& lines, std::size_t max_bytes);

// Trains a model that restores any text exactly. It does not normalize, adds no space in front and
// keeps runs of spaces. Digits are separate tokens, and a line end is one token. Characters that
// the text lacks become bytes. Ids are those of Llama: 0 is unknown, 1 and 2 begin and end a text.
//
// `lines` are consumed. Deterministic. Returns the content of a .model file. Returns kBadInput for
// no text, an unknown algorithm, or a vocabulary that does not fit the text (with one that fits).
[[nodiscard]] Expected<std::string> train_sentence_piece(std::vector<std::string> lines,
                                                         const SentencePieceOptions& options);

}  // namespace dynmo::data
