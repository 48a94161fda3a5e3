// SPDX-License-Identifier: Apache-2.0
#pragma once

// Converts text to token shards, for `dynmo data prepare`. The same inputs and options give the
// same bytes, for any number of jobs.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/data/sentence_piece.h"
#include "dynmo/data/token_shard.h"

namespace dynmo::data {

// Returns the endings of prose, source code and JSON lines. .json and .csv are not among them,
// because they are mostly data. Upper and lower case are equal.
[[nodiscard]] std::vector<std::string> default_endings();

struct PrepareProgress {
  // Compressed files are read to measure their text. The text is read to choose what is held out,
  // to draw a tokenizer's training text, and to tokenize it.
  enum class Phase { kMeasure, kHoldOut, kDraw, kTrain, kTokenize };
  Phase phase = Phase::kTokenize;
  std::int64_t bytes = 0;  // of the text, read so far in this phase; kMeasure: of the files
  std::int64_t total_bytes = 0;
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
};

// The interpretation of a file.
enum class InputFormat {
  kAuto,       // JSON lines if its name or its first line shows it, else one document
  kText,       // one document
  kJsonLines,  // one document on each line
};

struct PrepareOptions {
  std::filesystem::path out;  // folder, new or empty unless `overwrite`
  bool overwrite = false;     // a data set in `out` is replaced
  InputFormat format = InputFormat::kAuto;
  // "bytes", or "sentencepiece" to train one on the text, or any value that open_tokenizer()
  // accepts.
  std::string tokenizer = std::string(kByteTokenizer);
  SentencePieceOptions training = {};                    // if one is trained
  std::int64_t training_bytes = std::int64_t{32} << 20;  // of text drawn for that, about
  double validation = 0.02;  // share of the documents held out, in [0, 1)
  std::uint64_t seed = 0;    // of the choice of the documents held out, and of the text drawn
  // Endings of the names of files in a folder that are read. A file given by its path is always
  // read.
  std::vector<std::string> endings = default_endings();
  std::string text_key = "text";                              // key of the document in JSON lines
  int jobs = 1;                                               // threads
  std::function<void(const PrepareProgress&)> progress = {};  // called at intervals
};

// The documents that are held out for validation.
enum class HeldOutKind {
  kNotAsked,  // nothing: the share is 0
  kDrawn,     // each document by a separate draw
  kDocument,  // one document, if the draw takes none
  kEnd,       // end of the longest document, if each is a large part of the text
  kNothing,   // nothing: the text is too short to be cut
};

struct PrepareReport {
  ShardSummary train;
  ShardSummary validation;
  HeldOutKind held_out = HeldOutKind::kNotAsked;
  std::string held_out_name = {};  // of the chosen document
  std::int32_t vocabulary = 0;
  std::string tokenizer;            // kind
  std::int64_t training_lines = 0;  // drawn to train it
  std::int64_t unused_lines = 0;    // of those, left out to bound memory
  std::int64_t bytes = 0;           // of the text in the files
  std::int64_t files = 0;           // read
  std::int64_t json_lines = 0;      // of those, taken for JSON lines
  // The first file that is JSON lines by its first line, not by its name.
  std::string first_by_content = {};
  std::int64_t too_large = 0;           // documents drawn, and trained on because of their size
  std::int64_t skipped_binary = 0;      // NUL bytes, invalid UTF-8, pointers of Git LFS
  std::string first_binary = {};        // the first of those
  std::string why_binary = {};          // its fault
  std::int64_t skipped_ending = 0;      // in a folder, of another ending
  std::int64_t skipped_compressed = 0;  // in a folder, of one of the endings but compressed
  std::int64_t skipped_empty = 0;       // files and JSON lines without text
  std::int64_t skipped_twice = 0;       // reached before by another path
  std::int64_t skipped_other = 0;       // links to folders or to nothing, pipes, inside a folder
  [[nodiscard]] std::int64_t skipped() const {
    return skipped_binary + skipped_ending + skipped_compressed + skipped_empty + skipped_twice +
           skipped_other;
  }
};

// Prepares the text of `paths` in order, and of the files of a folder by sorted relative name.
// Files compressed by gzip or zstd give the same result as their text. Names that begin with a dot
// are skipped. A file is one document, or each of its lines if it is JSON lines. Each document ends
// with the end-of-document token.
//
// A digest of (seed, name relative to the given path, line) decides whether a document is held out.
// So the choice does not change if other files are added. No document above a tenth of the text (or
// the share) is held out whole. If the draw takes none, the document that a larger share would take
// first is held out. If there is no such document, or the draw takes all, the end of the longest
// document is held out. A tokenizer is trained on lines drawn from the other text.
//
// Writes train.{bin,idx}, validation.{bin,idx}, the tokenizer's file (unless it is bytes) and last
// dataset.json, durably. A folder has a dataset.json only if it is complete. Memory grows by 12
// bytes a document and a name a file, not with the text. A job takes about 40 MiB. Training a
// tokenizer takes some ten times `training_bytes`, but at most about half a GiB.
//
// Returns kBadInput if `out` contains other files or the text, or a path does not exist. Other
// causes are a JSON line without `text_key` (with file and line), options out of range, and no
// text. Also returns the errors of the tokenizer's functions.
[[nodiscard]] Expected<PrepareReport> prepare(std::span<const std::filesystem::path> paths,
                                              const PrepareOptions& options);

}  // namespace dynmo::data
