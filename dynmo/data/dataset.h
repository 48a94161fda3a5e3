// SPDX-License-Identifier: Apache-2.0
#pragma once

// A prepared folder: its shards and what dataset.json says about them.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/data/token_shard.h"
#include "dynmo/data/tokenizer.h"

namespace dynmo::data {

inline constexpr const char* kDescriptionFile = "dataset.json";
inline constexpr const char* kTokenizerFile = "tokenizer.model";  // absent where it is bytes

// dataset.json, "format": "dynmo-dataset-1".
struct DatasetDescription {
  std::string tokenizer;             // kByteTokenizer or kSentencePieceTokenizer
  Digest tokenizer_model = {};       // of tokenizer.model; zeros where it is bytes
  std::int32_t vocabulary = 0;       // tokens are below it
  std::int32_t end_of_document = 0;  // the token that ends each document
  std::uint64_t seed = 0;
  double validation_share = 0;
  ShardSummary train;
  ShardSummary validation;
  friend bool operator==(const DatasetDescription&, const DatasetDescription&) = default;
};

// A value: copies share the mappings. Any number of threads may read.
struct Dataset {
  std::filesystem::path path;
  DatasetDescription description;
  TokenShard train;
  TokenShard validation;  // may have no tokens
};

// Which tokenizer this is: "bytes", or the digest of its model as text.
[[nodiscard]] std::string tokenizer_name(const DatasetDescription& description);
[[nodiscard]] std::string tokenizer_name(const Tokenizer& tokenizer);

// Writes DIR/dataset.json durably.
[[nodiscard]] Expected<void> write_description(const std::filesystem::path& folder,
                                               const DatasetDescription& description);
// kBadInput naming the file and the JSON pointer.
[[nodiscard]] Expected<DatasetDescription> read_description(const std::filesystem::path& folder);

// Opens the folder, and checks the shards' structure and that they have the documents and tokens of
// dataset.json. Does not read the tokens: see verify. kBadInput, naming the file.
[[nodiscard]] Expected<Dataset> open_dataset(const std::filesystem::path& folder);

// The tokenizer of a prepared folder. kBadInput: tokenizer.model is missing, or not the one that
// the description tells of.
[[nodiscard]] Expected<std::unique_ptr<const Tokenizer>> tokenizer_of(
    const std::filesystem::path& folder, const DatasetDescription& description);

// Reads everything and compares the digests. kBadInput, naming the shard that has changed.
[[nodiscard]] Expected<void> verify(const Dataset& dataset);

}  // namespace dynmo::data
