// SPDX-License-Identifier: Apache-2.0
#pragma once

// Several token shards read as one, because other programs divide a data set into shards.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "dynmo/core/digest.h"
#include "dynmo/core/expected.h"
#include "dynmo/data/token_shard.h"

namespace dynmo::data {

// Several shards as one sequence of tokens. A value: copies share the mappings. Any number of
// threads may read.
class TokenShards {
 public:
  TokenShards(TokenShard shard) : TokenShards(std::vector{std::move(shard)}) {}  // NOLINT
  // Joins the shards. Requires at least one.
  explicit TokenShards(std::vector<TokenShard> shards);

  // Opens the pair PREFIX.bin and PREFIX.idx, or all pairs of a folder by sorted names. `path` is
  // PREFIX, with or without one of the two endings, or the folder. Returns kBadInput if neither
  // exists, or the error of TokenShard::open.
  [[nodiscard]] static Expected<TokenShards> open(const std::filesystem::path& path);

  [[nodiscard]] const std::vector<TokenShard>& shards() const { return shards_; }
  [[nodiscard]] std::int64_t tokens() const { return first_.back(); }
  // Copies the tokens from `first` on, across the ends of shards. Requires 0 <= first and first +
  // tokens.size() <= tokens(). A value that does not fit an int32 becomes negative.
  void read(std::int64_t first, std::span<std::int32_t> tokens) const;
  // Returns a digest of the sizes and of all tokens, if they have at most `max_bytes`. For larger
  // data it uses a sample of that size, spread over all. Two hosts compare it before they train on
  // the data together.
  [[nodiscard]] Digest fingerprint(std::int64_t max_bytes = std::int64_t{1} << 30) const;
  // Returns the path of the .bin that has token `position`, for messages. Requires 0 <= position <
  // tokens().
  [[nodiscard]] std::string file_of(std::int64_t position) const;

 private:
  [[nodiscard]] std::size_t shard_of(std::int64_t position) const;

  std::vector<TokenShard> shards_;
  std::vector<std::int64_t> first_;  // token of each shard, then the number of all tokens
};

}  // namespace dynmo::data
