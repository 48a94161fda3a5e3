// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/token_shards.h"

#include <algorithm>
#include <array>

#include "dynmo/core/check.h"

namespace dynmo::data {

TokenShards::TokenShards(std::vector<TokenShard> shards) : shards_(std::move(shards)), first_{0} {
  DYNMO_CHECK(!shards_.empty(), "a shard");
  for (const TokenShard& shard : shards_) first_.push_back(first_.back() + shard.tokens());
}

Expected<TokenShards> TokenShards::open(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code fault;
  std::vector<fs::path> prefixes;
  if (fs::is_directory(path, fault)) {
    fs::directory_iterator next(path, fault);
    for (; !fault && next != fs::directory_iterator(); next.increment(fault)) {
      if (next->path().extension() == ".idx") {
        prefixes.push_back(fs::path(next->path()).replace_extension());
      }
    }
    if (prefixes.empty()) {
      return make_error(
          ErrorCode::kBadInput,
          "'{}' has neither a dataset.json nor token shards (.bin and .idx): wanted a "
          "folder that `dynmo data prepare` made, or Megatron's shards",
          path.string());
    }
    std::sort(prefixes.begin(), prefixes.end());
  } else {
    const bool ending = path.extension() == ".idx" || path.extension() == ".bin";
    prefixes.push_back(ending ? fs::path(path).replace_extension() : path);
    if (!fs::exists(prefixes.front().string() + ".idx", fault)) {
      return make_error(ErrorCode::kBadInput,
                        "'{}' is neither a folder nor the prefix of token shards ({}.idx is not "
                        "there): wanted a folder that `dynmo data prepare` made, or Megatron's "
                        "shards without .bin and .idx",
                        path.string(), prefixes.front().string());
    }
  }
  std::vector<TokenShard> shards;
  for (const auto& prefix : prefixes) {
    DYNMO_ASSIGN(TokenShard shard, TokenShard::open(prefix));
    shards.push_back(std::move(shard));
  }
  return TokenShards(std::move(shards));
}

std::size_t TokenShards::shard_of(std::int64_t position) const {
  const auto after = std::upper_bound(first_.begin(), first_.end(), position);
  return static_cast<std::size_t>(after - first_.begin()) - 1;
}

void TokenShards::read(std::int64_t first, std::span<std::int32_t> tokens) const {
  const auto count = static_cast<std::int64_t>(tokens.size());
  DYNMO_CHECK(first >= 0 && count <= this->tokens() && first <= this->tokens() - count,
              "tokens within the {} there are, got {} from {}", this->tokens(), count, first);
  while (!tokens.empty()) {
    const std::size_t i = shard_of(first);
    const std::int64_t some =
        std::min(first_[i + 1] - first, static_cast<std::int64_t>(tokens.size()));
    shards_[i].read(first - first_[i], tokens.first(static_cast<std::size_t>(some)));
    tokens = tokens.subspan(static_cast<std::size_t>(some));
    first += some;
  }
}

Digest TokenShards::fingerprint(std::int64_t max_bytes) const {
  Digester digester;
  for (const TokenShard& shard : shards_) {
    const std::array sizes = {shard.tokens(), shard.sequences(), shard.documents()};
    digester.update(std::as_bytes(std::span(sizes)));
  }
  constexpr std::int64_t kPiece = 1 << 16;  // tokens
  const std::int64_t pieces = (tokens() + kPiece - 1) / kPiece;
  const std::int64_t taken = std::min(
      pieces, std::max<std::int64_t>(
                  2, max_bytes / (kPiece * static_cast<std::int64_t>(sizeof(std::int32_t)))));
  std::vector<std::int32_t> some(static_cast<std::size_t>(std::min(kPiece, tokens())));
  for (std::int64_t i = 0; i < taken; ++i) {
    const std::int64_t piece = taken < 2 ? 0 : i * (pieces - 1) / (taken - 1);
    const std::int64_t first = piece * kPiece;
    const std::int64_t count = std::min(kPiece, tokens() - first);
    const std::span here = std::span(some).first(static_cast<std::size_t>(count));
    read(first, here);
    digester.update(std::as_bytes(here));
  }
  return digester.digest();
}

std::string TokenShards::file_of(std::int64_t position) const {
  return shards_[shard_of(position)].prefix().string() + ".bin";
}

}  // namespace dynmo::data
