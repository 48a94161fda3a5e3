// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/token_shards.h"

#include <gtest/gtest.h>

#include <numeric>
#include <span>

#include "dynmo/core/check.h"
#include "dynmo/data/sampler.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {
namespace {

// A shard with the tokens from `first` on.
void write_shard(const TempFolder& folder, const char* name, int first, int count, TokenType type) {
  auto writer = TokenShardWriter::create(folder.path() / name, type);
  ASSERT_TRUE(writer);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  ASSERT_TRUE(writer->append(tokens));
  if (count > 0) writer->end_document();
  ASSERT_TRUE(writer->finish());
}

TEST(TokenShards, OfAFolderAreOneShardInTheOrderOfTheirNames) {
  const TempFolder folder;
  write_shard(folder, "part_1", 100, 50, TokenType::kInt32);
  write_shard(folder, "part_0", 0, 100, TokenType::kUint16);
  write_shard(folder, "part_2", 150, 0, TokenType::kUint16);
  write_shard(folder, "part_3", 150, 30, TokenType::kUint16);
  const auto shards = TokenShards::open(folder.path());
  ASSERT_TRUE(shards) << shards.error().message;
  ASSERT_EQ(shards->tokens(), 180);
  for (int first = 0; first <= 180; ++first) {
    for (int count = 0; first + count <= 180; count += 7) {
      std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
      shards->read(first, tokens);
      for (int i = 0; i < count; ++i) ASSERT_EQ(tokens[static_cast<std::size_t>(i)], first + i);
    }
  }
  std::vector<std::int32_t> two(2);
  EXPECT_THROW(shards->read(179, two), CheckFailure);
  EXPECT_EQ(shards->file_of(99), (folder.path() / "part_0.bin").string());
  EXPECT_EQ(shards->file_of(150), (folder.path() / "part_3.bin").string());
}

TEST(TokenShards, AreSampledAcrossTheirEnds) {
  const TempFolder folder;
  write_shard(folder, "a", 0, 55, TokenType::kUint16);
  write_shard(folder, "b", 55, 46, TokenType::kUint16);
  write_shard(folder, "all", 0, 101, TokenType::kUint16);
  const auto one = *TokenShard::open(folder.path() / "all");
  const TokenShards two(
      {*TokenShard::open(folder.path() / "a"), *TokenShard::open(folder.path() / "b")});
  const SamplerOptions options{.sequence = 10, .vocabulary = 101, .seed = 3};
  const auto expected = Sampler::make(one, options);
  const auto sampler = Sampler::make(two, options);
  ASSERT_TRUE(expected && sampler);
  for (int i = 0; i < 40; ++i) {
    std::vector<std::int32_t> a(11);
    std::vector<std::int32_t> b(11);
    expected->sample(i, a);
    sampler->sample(i, b);
    EXPECT_EQ(a, b) << i;
  }
}

TEST(TokenShards, AreOpenedByPrefixOrEitherFile) {
  const TempFolder folder;
  write_shard(folder, "one", 0, 5, TokenType::kUint16);
  for (const char* name : {"one", "one.bin", "one.idx"}) {
    const auto shards = TokenShards::open(folder.path() / name);
    ASSERT_TRUE(shards) << shards.error().message;
    EXPECT_EQ(shards->tokens(), 5);
  }
  EXPECT_NE(TokenShards::open(folder.path() / "two").error().message.find("two.idx is not there"),
            std::string::npos);
  std::filesystem::create_directory(folder.path() / "empty");
  EXPECT_NE(TokenShards::open(folder.path() / "empty").error().message.find("neither"),
            std::string::npos);
}

// A folder with one shard of these tokens.
Digest fingerprint_of(const std::vector<std::int32_t>& tokens, std::int64_t max_bytes,
                      const std::vector<std::size_t>& documents = {}) {
  const TempFolder folder;
  auto writer = TokenShardWriter::create(folder.path() / "shard", TokenType::kUint16);
  std::size_t first = 0;
  const auto add = [&](std::size_t end) {
    EXPECT_TRUE(writer->append(std::span(tokens).subspan(first, end - first)));
    writer->end_document();
    first = end;
  };
  for (const std::size_t end : documents) add(end);
  if (first < tokens.size()) add(tokens.size());
  EXPECT_TRUE(writer->finish());
  return TokenShards::open(folder.path())->fingerprint(max_bytes);
}

constexpr std::int64_t kAll = std::int64_t{1} << 30;

TEST(TokenShards, AFingerprintShowsAnyTokenThatChanged) {
  std::vector<std::int32_t> tokens(150000);  // more than two pieces
  std::iota(tokens.begin(), tokens.end(), 0);
  for (std::int32_t& token : tokens) token %= 50000;
  const Digest before = fingerprint_of(tokens, kAll);
  EXPECT_EQ(fingerprint_of(tokens, kAll), before);
  for (const std::size_t at : {0UL, 1UL, 65535UL, 65536UL, 100000UL, 131072UL, 149999UL}) {
    std::vector<std::int32_t> other = tokens;
    other[at] ^= 1;
    EXPECT_NE(fingerprint_of(other, kAll), before) << at;
  }
  std::vector<std::int32_t> longer = tokens;
  longer.push_back(0);
  EXPECT_NE(fingerprint_of(longer, kAll), before);
  EXPECT_NE(fingerprint_of(tokens, kAll, {70000}), before) << "cut into other documents";
}

TEST(TokenShards, AFingerprintOfMoreThanItsLimitIsOfASampleOfAll) {
  constexpr std::size_t kPiece = 1 << 16;
  std::vector<std::int32_t> tokens(9 * kPiece + 5);
  const std::int64_t three_pieces = std::int64_t{3} * kPiece * 4;
  const auto with = [&](std::size_t at) {
    std::vector<std::int32_t> other = tokens;
    other[at] = 7;
    return fingerprint_of(other, three_pieces);
  };
  const Digest before = fingerprint_of(tokens, three_pieces);
  EXPECT_NE(with(0), before);  // the first of ten pieces, one in the middle, the last
  EXPECT_NE(with(4 * kPiece), before);
  EXPECT_NE(with(tokens.size() - 1), before);
  EXPECT_EQ(with(2 * kPiece), before) << "not sampled";
  EXPECT_EQ(with(7 * kPiece), before);
  // However small the limit, the first and the last piece are read.
  std::vector<std::int32_t> other = tokens;
  other.back() = 7;
  EXPECT_NE(fingerprint_of(other, 1), fingerprint_of(tokens, 1));
}

TEST(TokenShards, AFingerprintIsOfTheShardsAsTheyAreCut) {
  const TempFolder one;
  const TempFolder two;
  write_shard(one, "a", 0, 100, TokenType::kUint16);
  write_shard(two, "a", 0, 60, TokenType::kUint16);
  write_shard(two, "b", 60, 40, TokenType::kUint16);
  EXPECT_NE(TokenShards::open(one.path())->fingerprint(),
            TokenShards::open(two.path())->fingerprint());
  const TempFolder empty;
  write_shard(empty, "a", 0, 0, TokenType::kUint16);
  EXPECT_NE(TokenShards::open(empty.path())->fingerprint(),
            TokenShards::open(one.path())->fingerprint());
}

}  // namespace
}  // namespace dynmo::data
