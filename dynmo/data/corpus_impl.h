// SPDX-License-Identifier: Apache-2.0
#pragma once

// The files that a preparation reads, and their text in blocks that can be worked on one by one.
// Which blocks there are follows from the files alone, so that results do not depend on who works
// on which.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/data/prepare.h"

namespace dynmo::data {

struct CorpusFile {
  std::filesystem::path path;
  std::string name;        // relative to what the user gave
  std::int64_t bytes = 0;  // when it was listed: no more are read
  // Whether its name says so: .jsonl, .ndjson.
  [[nodiscard]] bool is_named_json_lines() const;
  [[nodiscard]] bool is_named_json() const;  // .json
};

struct Corpus {
  std::vector<CorpusFile> files;
  std::int64_t bytes = 0;
  PrepareReport skipped;  // what was passed over without being read
};

// Files in the order of `paths`, folders by sorted names. kBadInput: a path that is neither a file
// nor a folder, or a compressed file given by itself.
[[nodiscard]] Expected<Corpus> list_corpus(std::span<const std::filesystem::path> paths,
                                           const std::vector<std::string>& endings);

// Text is tokenized in pieces of at most this: documents up to it as a whole, longer ones cut
// behind the end of a line (of a character where a piece has none).
inline constexpr std::size_t kPieceBytes = std::size_t{4} << 20;
// A line of JSON lines is read as a whole, which takes some eight times its size.
inline constexpr std::size_t kMaxLine = std::size_t{64} << 20;

// Part of one file.
struct Block {
  enum class Kind {
    kFile,   // all of it, not looked at yet
    kPiece,  // of a file that is text
    kLines,  // whole lines of JSON lines
  };
  Kind kind = Kind::kFile;
  const CorpusFile* file = nullptr;
  std::int64_t number = 0;  // of the piece, from 0; of the first line, from 1
  std::int64_t offset = 0;  // bytes of the file before a piece
  bool last = true;         // the document ends with it
  std::string text;
};

// A file that is no text, and why.
struct NotText {
  const CorpusFile* file = nullptr;
  std::string why;
};

// Reads the blocks of a corpus in order. One thread.
class BlockReader {
 public:
  BlockReader(const Corpus& corpus, const PrepareOptions& options)
      : corpus_(corpus), format_(options.format), text_key_(options.text_key) {}
  // False at the end. kBadInput: a file that cannot be read, a line above kMaxLine, a .json file of
  // something else than JSON lines.
  [[nodiscard]] Expected<bool> next(Block& block);
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }  // of the corpus, behind us
  // Files above kPieceBytes that turned out to be no text.
  [[nodiscard]] const std::vector<NotText>& binary() const { return binary_; }

 private:
  Expected<bool> open();
  Expected<bool> is_json_lines();
  Expected<std::string> first_line();
  Expected<std::string> why_not_text();
  Expected<void> read(std::string& text, std::size_t max);
  Expected<void> next_piece(Block& block);
  Expected<void> next_lines(Block& block);

  const Corpus& corpus_;
  InputFormat format_;
  std::string text_key_;
  std::size_t index_ = 0;  // of the next file
  const CorpusFile* file_ = nullptr;
  bool lines_ = false;  // it is JSON lines
  std::ifstream stream_;
  std::int64_t left_ = 0;    // bytes of the file not read yet
  std::string carried_;      // read, and not in a block yet
  std::int64_t number_ = 0;  // of the next block
  std::int64_t offset_ = 0;  // of the next piece
  std::int64_t bytes_ = 0;
  std::vector<NotText> binary_;
};

// A document, or a piece of one.
struct Document {
  std::string_view text;
  std::string_view name;    // of the document: relative, with the line behind a colon
  std::int64_t piece = 0;   // from 0
  std::int64_t offset = 0;  // bytes of the document before it
  bool last = true;         // it ends the document
  const CorpusFile* file = nullptr;
};

// Counts what blocks of the corpus hold.
struct BlockCounts {
  std::int64_t files = 0;                        // begun, and text
  std::int64_t json_lines = 0;                   // of those
  const CorpusFile* first_by_content = nullptr;  // of those, the first that is not named so
  std::int64_t documents = 0;
  std::int64_t empty = 0;
  std::vector<NotText> binary;
};

// Calls `take` with every document of the blocks, in order. kBadInput: a line that is no object
// with a string under `text_key`.
[[nodiscard]] Expected<BlockCounts> for_each_document(
    std::span<const Block> blocks, const std::string& text_key,
    const std::function<void(const Document&)>& take);

}  // namespace dynmo::data
