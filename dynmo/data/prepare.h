// SPDX-License-Identifier: Apache-2.0
#pragma once

// Text in, token shards out: what `dynmo data prepare` does. The same inputs and options give the
// same bytes on every machine.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/data/token_shard.h"

namespace dynmo::data {

// Prose, source code, JSON lines. Not .json and .csv: mostly data, not language.
[[nodiscard]] std::vector<std::string> default_endings();

struct PrepareProgress {
  std::int64_t files = 0;
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
};

struct PrepareOptions {
  std::filesystem::path out;  // folder to write; made if absent, an older data set in it replaced
  double validation = 0.02;   // share of the documents held out, in [0, 1)
  std::uint64_t seed = 0;     // of the choice of the documents held out
  // Files of a folder that are taken, by the end of their names; a file given by itself always is.
  std::vector<std::string> endings = default_endings();
  std::string text_key = "text";  // where a line of a .jsonl file has its document
  std::function<void(const PrepareProgress&)> progress = {};  // called now and then
};

struct PrepareReport {
  ShardSummary train;
  ShardSummary validation;
  std::int64_t files = 0;           // read
  std::int64_t skipped_binary = 0;  // NUL bytes or invalid UTF-8
  std::int64_t skipped_ending = 0;  // in a folder, of another ending
  std::int64_t skipped_empty = 0;   // files and JSON lines without text
  std::int64_t skipped_twice = 0;   // reached before by another path
  std::int64_t skipped_other = 0;   // links to folders or to nothing, pipes, inside a folder
  [[nodiscard]] std::int64_t skipped() const {
    return skipped_binary + skipped_ending + skipped_empty + skipped_twice + skipped_other;
  }
};

// Reads `paths` in order, folders by sorted relative name; names that begin with a dot are passed
// over. A file is one document, a line of a .jsonl file is one. Each ends with the end-of-document
// token, and is held out by a digest of (seed, name relative to the given path, line), so that the
// choice does not change when other files are added.
//
// Writes train.{bin,idx}, validation.{bin,idx} and last dataset.json, durably: a folder has a
// dataset.json only if all of it is there. Memory does not grow with the text (12 bytes a
// document). kBadInput: a path that is not there, a JSON line without `text_key` (file and line are
// named), options out of range, no text at all, nothing left for training.
[[nodiscard]] Expected<PrepareReport> prepare(std::span<const std::filesystem::path> paths,
                                              const PrepareOptions& options);

}  // namespace dynmo::data
