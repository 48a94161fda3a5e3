// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/token_shards.h"

#include <gtest/gtest.h>

#include <numeric>

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

}  // namespace
}  // namespace dynmo::data
