// SPDX-License-Identifier: Apache-2.0
#pragma once

// The files that a preparation reads, and their text in blocks that are processed separately. The
// blocks follow from the files alone, so results do not depend on how threads share them.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/data/prepare.h"
#include "dynmo/data/text_stream.h"

namespace dynmo::data {

struct CorpusFile {
  std::filesystem::path path;
  std::string name;        // relative to what the user gave, without .gz and .zst
  std::int64_t bytes = 0;  // of its text when listed; no more are read
  // Returns whether the name ends with .jsonl or .ndjson.
  [[nodiscard]] bool is_named_json_lines() const;
  [[nodiscard]] bool is_named_json() const;  // .json
};

struct Corpus {
  std::vector<CorpusFile> files;
  std::int64_t bytes = 0;
  PrepareReport skipped;  // files that were skipped without reading
};

// Lists files in the order of `paths`, and those of folders by sorted names. Returns kBadInput for
// a path that is neither a file nor a folder, or that names a file compressed by other than gzip
// and zstd.
[[nodiscard]] Expected<Corpus> list_corpus(std::span<const std::filesystem::path> paths,
                                           const std::vector<std::string>& endings);
// Sets the bytes of files with compressed content to those of their text. So results are the same
// as for the files without compression. Decompresses with `jobs` threads. Calls `read` with the
// number of bytes of files examined so far. Returns kBadInput for a damaged file.
[[nodiscard]] Expected<void> measure_text(Corpus& corpus, int jobs,
                                          const std::function<void(std::int64_t)>& read);

// Maximum size of a piece of text that is tokenized. Longer documents are cut behind a line end, or
// behind a character if a piece has no line end.
inline constexpr std::size_t kPieceBytes = std::size_t{4} << 20;
// Maximum size of a line of JSON lines. A line is read as a whole, which takes some eight times its
// size.
inline constexpr std::size_t kMaxLine = std::size_t{64} << 20;

// Part of one file.
struct Block {
  enum class Kind {
    kFile,   // all of it, not yet examined
    kPiece,  // of a text file
    kLines,  // whole lines of JSON lines
  };
  Kind kind = Kind::kFile;
  const CorpusFile* file = nullptr;
  std::int64_t number = 0;  // of the piece, from 0; of the first line, from 1
  std::int64_t offset = 0;  // bytes of the file before a piece
  bool last = true;         // the document ends with it
  std::string text;
};

// A file that is not text, and the reason.
struct NotText {
  const CorpusFile* file = nullptr;
  std::string why;
};

// Reads the blocks of a corpus in order. One thread uses it.
class BlockReader {
 public:
  BlockReader(const Corpus& corpus, const PrepareOptions& options)
      : corpus_(corpus), format_(options.format), text_key_(options.text_key) {}
  // Reads the next block. Returns false at the end. Returns kBadInput for an unreadable file, a
  // line above kMaxLine, or a .json file that is not JSON lines.
  [[nodiscard]] Expected<bool> next(Block& block);
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }  // of the corpus, read so far
  // Returns files above kPieceBytes that are not text.
  [[nodiscard]] const std::vector<NotText>& binary() const { return binary_; }

 private:
  // The file that is being read, and the place in it.
  struct OpenFile {
    const CorpusFile* file = nullptr;
    bool lines = false;  // it is JSON lines
    TextStream stream;
    std::int64_t left = 0;    // bytes not read yet
    std::string carried;      // read, and not in a block yet
    std::int64_t number = 0;  // of the next block
    std::int64_t offset = 0;  // of the next piece
  };

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
  OpenFile open_;
  std::int64_t bytes_ = 0;
  std::vector<NotText> binary_;
};

// A document, or a piece of one.
struct Document {
  std::string_view text;
  // Name of the document: its relative path, with a colon and the line.
  std::string_view name;
  std::int64_t piece = 0;   // from 0
  std::int64_t offset = 0;  // bytes of the document before it
  bool last = true;         // last piece of the document
  const CorpusFile* file = nullptr;
};

struct BlockCounts {
  std::int64_t files = 0;                        // begun, if text
  std::int64_t json_lines = 0;                   // of those
  const CorpusFile* first_by_content = nullptr;  // first of those without such a name
  std::int64_t documents = 0;
  std::int64_t empty = 0;
  std::vector<NotText> binary;
};

// Calls `take` for each document of the blocks, in order. Returns kBadInput for a line that is not
// an object with a string under `text_key`.
[[nodiscard]] Expected<BlockCounts> for_each_document(
    std::span<const Block> blocks, const std::string& text_key,
    const std::function<void(const Document&)>& take);

}  // namespace dynmo::data
