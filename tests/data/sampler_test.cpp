// SPDX-License-Identifier: Apache-2.0
#include "dynmo/data/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "tests/support/temp_folder.h"

namespace dynmo::data {
namespace {

// A shard whose token i is i, so that a sample shows its place.
TokenShard counting_shard(const TempFolder& folder, std::int64_t tokens) {
  auto writer = TokenShardWriter::create(folder.path() / "counting");
  std::vector<std::int32_t> values(static_cast<std::size_t>(tokens));
  std::iota(values.begin(), values.end(), 0);
  EXPECT_TRUE(writer->append(values));
  writer->end_document();
  EXPECT_TRUE(writer->finish());
  return *TokenShard::open(folder.path() / "counting");
}

Sampler make(const TokenShard& shard, std::int64_t sequence, std::uint64_t seed) {
  return *Sampler::make(shard, {.sequence = sequence, .vocabulary = 1 << 16, .seed = seed});
}

std::vector<std::int64_t> pass_of(const Sampler& sampler, std::int64_t pass) {
  std::vector<std::int64_t> positions;
  for (std::int64_t i = 0; i < sampler.windows(); ++i) {
    positions.push_back(sampler.position(pass * sampler.windows() + i));
  }
  return positions;
}

TEST(Permute, IsABijectionOfEverySize) {
  for (std::uint64_t size = 1; size <= 300; ++size) {
    for (std::uint64_t key = 0; key < 3; ++key) {
      std::vector<bool> seen(size);
      for (std::uint64_t i = 0; i < size; ++i) {
        const std::uint64_t image = permute(i, size, key);
        ASSERT_LT(image, size);
        ASSERT_FALSE(seen[image]) << "size " << size << " key " << key << " index " << i;
        seen[image] = true;
      }
    }
  }
  for (const std::uint64_t size : {(std::uint64_t{1} << 40) + 7, (std::uint64_t{1} << 61) - 1}) {
    std::set<std::uint64_t> images;
    for (std::uint64_t i = 0; i < 1000; ++i) images.insert(permute(size - 1 - i, size, 5));
    EXPECT_EQ(images.size(), 1000U);
    EXPECT_LT(*images.rbegin(), size);
  }
}

// All 24 orders of four windows come up about equally often over 24,000 keys: chi-square with 23
// degrees of freedom is below 49.7 with probability 0.999.
TEST(Permute, OfFourIsAnyOrderEquallyOften) {
  std::map<std::array<std::uint64_t, 4>, int> counts;
  constexpr int kKeys = 24000;
  for (int key = 0; key < kKeys; ++key) {
    std::array<std::uint64_t, 4> order{};
    for (std::uint64_t i = 0; i < 4; ++i)
      order[i] = permute(i, 4, mix_key({7, std::uint64_t(key)}));
    ++counts[order];
  }
  ASSERT_EQ(counts.size(), 24U);
  double chi_square = 0;
  for (const auto& [order, count] : counts) {
    const double off = count - kKeys / 24.0;
    chi_square += off * off / (kKeys / 24.0);
  }
  EXPECT_LT(chi_square, 49.7);
}

// Where window i stands is uniform, also for a size that is no square: 99 degrees of freedom each.
TEST(Permute, PutsEveryIndexAnywhere) {
  constexpr std::uint64_t kSize = 100;
  constexpr int kKeys = 10000;
  for (const std::uint64_t index : {0U, 1U, 37U, 99U}) {
    std::vector<int> counts(kSize);
    for (int key = 0; key < kKeys; ++key) {
      ++counts[permute(index, kSize, mix_key({9, std::uint64_t(key)}))];
    }
    double chi_square = 0;
    for (const int count : counts) chi_square += (count - 100.0) * (count - 100.0) / 100.0;
    EXPECT_LT(chi_square, 148.2) << index;  // probability 0.999
    EXPECT_GT(chi_square, 60.0) << index;
  }
}

TEST(Sampler, APassVisitsEveryWindowExactlyOnce) {
  const TempFolder folder;
  for (const std::int64_t tokens : {17, 100, 1001, 4096, 5003}) {
    const TokenShard shard = counting_shard(folder, tokens);
    for (const std::int64_t sequence : {1, 7, 16}) {
      const Sampler sampler = make(shard, sequence, 3);
      EXPECT_EQ(sampler.windows(), (tokens - 1) / sequence);
      for (std::int64_t pass = 0; pass < 3; ++pass) {
        auto positions = pass_of(sampler, pass);
        std::sort(positions.begin(), positions.end());
        EXPECT_GE(positions.front(), 0);
        EXPECT_LE(positions.back() + sequence + 1, tokens);
        for (std::size_t i = 1; i < positions.size(); ++i) {
          ASSERT_EQ(positions[i] - positions[i - 1], sequence)
              << tokens << " tokens, pass " << pass;
        }
      }
    }
  }
}

TEST(Sampler, GivesTheTokensOfItsWindow) {
  const TempFolder folder;
  const TokenShard shard = counting_shard(folder, 5000);
  const Sampler sampler = make(shard, 1500, 3);
  std::vector<std::int32_t> narrow(1501);
  std::vector<std::int64_t> wide(1501);
  for (std::int64_t i = 0; i < 20; ++i) {
    sampler.sample(i, narrow);
    sampler.sample(i, wide);
    for (std::size_t t = 0; t < narrow.size(); ++t) {
      ASSERT_EQ(narrow[t], sampler.position(i) + static_cast<std::int64_t>(t));
      ASSERT_EQ(wide[t], narrow[t]);
    }
  }
}

TEST(Sampler, IsTheSameInAnyOrderOfCallsAndForEveryCopy) {
  const TempFolder folder;
  const TokenShard shard = counting_shard(folder, 3000);
  const Sampler sampler = make(shard, 10, 5);
  std::vector<std::int64_t> forward;
  for (std::int64_t i = 0; i < 900; ++i) forward.push_back(sampler.position(i));
  const Sampler other = make(*TokenShard::open(shard.prefix()), 10, 5);
  for (std::int64_t i = 899; i >= 0; --i) {
    EXPECT_EQ(other.position(i), forward[static_cast<std::size_t>(i)]);
  }
}

TEST(Sampler, DiffersBetweenSeedsAndPasses) {
  const TempFolder folder;
  const TokenShard shard = counting_shard(folder, 3000);
  const Sampler five = make(shard, 10, 5);
  const Sampler six = make(shard, 10, 6);
  EXPECT_NE(pass_of(five, 0), pass_of(six, 0));
  EXPECT_NE(pass_of(five, 0), pass_of(five, 1));
  // The windows' borders move between the passes: 2999 = 299 x 10 + 9 leaves ten shifts.
  std::set<std::int64_t> shifts;
  for (std::int64_t pass = 0; pass < 200; ++pass) {
    shifts.insert(five.position(pass * five.windows()) % 10);
  }
  EXPECT_EQ(shifts.size(), 10U);
}

// Fixed for good: a restarted run must go on with the same data after an update of DynMo.
TEST(Sampler, KeepsItsOrderForGood) {
  const TempFolder folder;
  const Sampler sampler = make(counting_shard(folder, 1000), 64, 42);
  std::vector<std::int64_t> first;
  for (std::int64_t i = 0; i < 6; ++i) first.push_back(sampler.position(i));
  EXPECT_EQ(first, (std::vector<std::int64_t>{6, 454, 582, 70, 838, 390}));
}

TEST(Sampler, RefusesACorpusShorterThanASequence) {
  const TempFolder folder;
  const TokenShard shard = counting_shard(folder, 64);
  const auto sampler = Sampler::make(shard, {.sequence = 64, .vocabulary = 257, .seed = 0});
  ASSERT_FALSE(sampler);
  EXPECT_EQ(sampler.error().code, ErrorCode::kBadInput);
  EXPECT_NE(sampler.error().message.find("has 64 tokens, wanted at least 65"), std::string::npos);
  EXPECT_TRUE(Sampler::make(shard, {.sequence = 63, .vocabulary = 257, .seed = 0}));
}

TEST(Sampler, RefusesTokensOfAnotherVocabulary) {
  const TempFolder folder;
  const TokenShard shard = counting_shard(folder, 300);
  const auto sampler = Sampler::make(shard, {.sequence = 299, .vocabulary = 257, .seed = 0});
  ASSERT_TRUE(sampler);
  std::vector<std::int32_t> narrow(300);
  std::vector<std::int64_t> wide(300);
  EXPECT_THROW(sampler->sample(0, narrow), std::runtime_error);
  EXPECT_THROW(sampler->sample(0, wide), std::runtime_error);
  EXPECT_THROW(sampler->sample(0, std::span(narrow).first(3)), CheckFailure);
}

}  // namespace
}  // namespace dynmo::data
