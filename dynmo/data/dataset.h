// SPDX-License-Identifier: Apache-2.0
#pragma once

// A prepared folder: its shards and what dataset.json says about them.

#include <cstdint>
#include <filesystem>
#include <string>

#include "dynmo/core/expected.h"
#include "dynmo/data/token_shard.h"

namespace dynmo::data {

// dataset.json, "format": "dynmo-dataset-1".
struct DatasetDescription {
  std::string tokenizer;
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

// Writes DIR/dataset.json durably.
[[nodiscard]] Expected<void> write_description(const std::filesystem::path& folder,
                                               const DatasetDescription& description);
// kBadInput naming the file and the JSON pointer.
[[nodiscard]] Expected<DatasetDescription> read_description(const std::filesystem::path& folder);

// Opens the folder, and checks the shards' structure and that they have the documents and tokens of
// dataset.json. Does not read the tokens: see verify. kBadInput, naming the file.
[[nodiscard]] Expected<Dataset> open_dataset(const std::filesystem::path& folder);

// Reads everything and compares the digests. kBadInput, naming the shard that has changed.
[[nodiscard]] Expected<void> verify(const Dataset& dataset);

}  // namespace dynmo::data
