// SPDX-License-Identifier: Apache-2.0
#pragma once

// Several token shards read as one: what one data set is cut into elsewhere.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/data/token_shard.h"

namespace dynmo::data {

// A value: copies share the mappings. Any number of threads may read.
class TokenShards {
 public:
  TokenShards(TokenShard shard) : TokenShards(std::vector{std::move(shard)}) {}  // NOLINT
  // Requires at least one.
  explicit TokenShards(std::vector<TokenShard> shards);

  // PREFIX of PREFIX.bin and PREFIX.idx (an ending of the two may be given, too), or a folder with
  // such pairs: all of them, by sorted names. kBadInput: neither is there, or TokenShard::open's.
  [[nodiscard]] static Expected<TokenShards> open(const std::filesystem::path& path);

  [[nodiscard]] const std::vector<TokenShard>& shards() const { return shards_; }
  [[nodiscard]] std::int64_t tokens() const { return first_.back(); }
  // Copies the tokens from `first` on, across the ends of shards. Requires 0 <= first and first +
  // tokens.size() <= tokens(). A value that does not fit an int32 comes out negative.
  void read(std::int64_t first, std::span<std::int32_t> tokens) const;
  // Digests the sizes and every token up to `max_bytes` of tokens; of larger data, a sample of that
  // size spread over all. Two hosts compare it before they train on the data together.
  [[nodiscard]] Digest fingerprint(std::int64_t max_bytes = std::int64_t{1} << 30) const;
  // Path of the .bin that has token `position`, for messages. Requires 0 <= position < tokens().
  [[nodiscard]] std::string file_of(std::int64_t position) const;

 private:
  [[nodiscard]] std::size_t shard_of(std::int64_t position) const;

  std::vector<TokenShard> shards_;
  std::vector<std::int64_t> first_;  // token of each shard; last: all tokens
};

}  // namespace dynmo::data
