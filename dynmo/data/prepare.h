// SPDX-License-Identifier: Apache-2.0
#pragma once

// Text in, token shards out: what `dynmo data prepare` does. The same inputs and options give the
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

// Prose, source code, JSON lines. Not .json and .csv: mostly data, not language. The case of
// letters does not count.
[[nodiscard]] std::vector<std::string> default_endings();

struct PrepareProgress {
  // The text is read until a document is held out, once to draw what a tokenizer is trained on, and
  // once to tokenize it.
  enum class Phase { kHoldOut, kDraw, kTrain, kTokenize };
  Phase phase = Phase::kTokenize;
  std::int64_t bytes = 0;  // of the text, behind us in this phase
  std::int64_t total_bytes = 0;
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
};

// What a file is taken for.
enum class InputFormat {
  kAuto,       // JSON lines where its name or its first line says so, else one document
  kText,       // one document
  kJsonLines,  // a document a line
};

struct PrepareOptions {
  std::filesystem::path out;  // folder to write: absent, empty or, to overwrite, of a data set
  bool overwrite = false;     // the data set that is there is replaced
  InputFormat format = InputFormat::kAuto;
  // "bytes"; "sentencepiece": train one on the text; else what open_tokenizer() takes.
  std::string tokenizer = std::string(kByteTokenizer);
  SentencePieceOptions training = {};                    // where one is trained
  std::int64_t training_bytes = std::int64_t{32} << 20;  // of text drawn for that, about
  double validation = 0.02;  // share of the documents held out, in [0, 1)
  std::uint64_t seed = 0;    // of the choice of the documents held out, and of the text drawn
  // Files of a folder that are taken, by the end of their names; a file given by itself always is.
  std::vector<std::string> endings = default_endings();
  std::string text_key = "text";  // where a line of JSON lines has its document
  int jobs = 1;                   // threads
  std::function<void(const PrepareProgress&)> progress = {};  // called now and then
};

// Selects the documents that are held out for validation.
enum class HeldOutKind {
  kNotAsked,  // nothing: the share is 0
  kDrawn,     // each document by itself, by the draw
  kDocument,  // one document, where the draw takes none
  kEnd,       // the end of the longest document, where every document is a large part of the text
  kNothing,   // the text is too short to be cut
};

struct PrepareReport {
  ShardSummary train;
  ShardSummary validation;
  HeldOutKind held_out = HeldOutKind::kNotAsked;
  std::string held_out_name = {};  // of the document, where it is one
  std::int32_t vocabulary = 0;
  std::string tokenizer;                // kind
  std::int64_t training_lines = 0;      // drawn to train it
  std::int64_t unused_lines = 0;        // of those, left out to bound memory
  std::int64_t bytes = 0;               // of the files
  std::int64_t files = 0;               // read
  std::int64_t json_lines = 0;          // of those, taken for JSON lines
  std::string first_by_content = {};    // the first that its first line and not its name says to be
  std::int64_t too_large = 0;           // documents drawn, and trained on because of their size
  std::int64_t skipped_binary = 0;      // NUL bytes, invalid UTF-8, pointers of Git LFS
  std::string first_binary = {};        // the first of those
  std::string why_binary = {};          // and what is wrong with it
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

// Reads `paths` in order, folders by sorted relative name; names that begin with a dot are passed
// over. A file is one document, a line of JSON lines is one. Each ends with the end-of-document
// token, and is held out by a digest of (seed, name relative to the given path, line), so that the
// choice does not change when other files are added. No document above a tenth of the text (or the
// share) is held out whole. Where the draw takes none, the document that a larger share would take
// first is held out; else, and where it takes all, the end of the longest document. A tokenizer is
// trained on lines drawn from the text that is not held out.
//
// Writes train.{bin,idx}, validation.{bin,idx}, tokenizer.model (unless it is bytes) and last
// dataset.json, durably: a folder has a dataset.json only if all of it is there. Memory does not
// grow with the text: 12 bytes a document, about 40 MiB a job, a name a file; and where a tokenizer
// is trained, some ten times `training_bytes`, but at most about half a GiB. kBadInput: a folder
// to write that holds something else, or the text; a path that is not there, a JSON line without
// `text_key` (file and line are named), options out of range, no text at all; what the tokenizer's
// own functions say.
[[nodiscard]] Expected<PrepareReport> prepare(std::span<const std::filesystem::path> paths,
                                              const PrepareOptions& options);

}  // namespace dynmo::data
