// SPDX-License-Identifier: Apache-2.0
#pragma once

// A prepared folder: its shards and the contents of dataset.json.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/data/token_shard.h"
#include "dynmo/data/tokenizer.h"

namespace dynmo::data {

inline constexpr const char* kDescriptionFile = "dataset.json";
// Files of SentencePiece and of byte-level BPE. If the tokenizer is bytes, there is neither.
inline constexpr const char* kTokenizerFile = "tokenizer.model";
inline constexpr const char* kTokenizerJsonFile = "tokenizer.json";
inline constexpr const char* kTokenizerSettingsFile = "tokenizer_config.json";  // beside the latter

// dataset.json, "format": "dynmo-dataset-1".
struct DatasetDescription {
  std::string tokenizer;             // kByteTokenizer, kSentencePieceTokenizer or kByteLevelBpe
  Digest tokenizer_model = {};       // of tokenizer_file(); zeros if it is bytes
  std::int32_t vocabulary = 0;       // tokens are below it
  std::int32_t end_of_document = 0;  // the token that ends each document
  std::uint64_t seed = 0;
  double validation_share = 0;
  ShardSummary train;
  ShardSummary validation;
  friend bool operator==(const DatasetDescription&, const DatasetDescription&) = default;
};

// An opened data set. A value: copies share the mappings. Any number of threads may read.
struct Dataset {
  std::filesystem::path path;
  DatasetDescription description;
  TokenShard train;
  TokenShard validation;  // may have no tokens
};

// Returns the name of the file of a kind of tokenizer in a prepared folder, or "" for bytes.
[[nodiscard]] std::string tokenizer_file(std::string_view kind);

// Returns the name of the tokenizer: "bytes", or the digest of its model as text.
[[nodiscard]] std::string tokenizer_name(const DatasetDescription& description);
[[nodiscard]] std::string tokenizer_name(const Tokenizer& tokenizer);

// Writes DIR/dataset.json durably. Fails with kBadInput.
[[nodiscard]] Expected<void> write_description(const std::filesystem::path& folder,
                                               const DatasetDescription& description);
// Reads DIR/dataset.json. Returns kBadInput with the file and the JSON pointer.
[[nodiscard]] Expected<DatasetDescription> read_description(const std::filesystem::path& folder);

// Opens the folder, and checks that the shards are whole and have the documents and tokens of
// dataset.json. Does not read the tokens: see verify(). Returns kBadInput with the file.
[[nodiscard]] Expected<Dataset> open_dataset(const std::filesystem::path& folder);

// Returns the tokenizer of a prepared folder. Returns kBadInput if its file is missing, or
// has another digest than in the description.
[[nodiscard]] Expected<std::unique_ptr<const Tokenizer>> tokenizer_of(
    const std::filesystem::path& folder, const DatasetDescription& description);

// Reads all files and compares the digests. Returns kBadInput with the shard that has changed.
[[nodiscard]] Expected<void> verify(const Dataset& dataset);

}  // namespace dynmo::data
