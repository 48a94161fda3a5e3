// SPDX-License-Identifier: Apache-2.0
// Attention within buckets as devices compute it, run on the CPU against its kernels.
#include "dynmo/kernels/generic_selection.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/kernels/angular_hashes.h"
#include "tests/model/helpers.h"

namespace dynmo::kernels {
namespace {

using model::testing::random_tensor;

constexpr std::int64_t kSequences = 2;
constexpr std::int64_t kHeads = 4;

// Draws buckets, of which one may be empty, and one has most tokens.
at::Tensor random_buckets(Rng& rng, std::int64_t tokens, std::int64_t buckets) {
  at::Tensor bucket_BHT = at::empty({kSequences, kHeads, tokens}, at::kInt);
  for (std::int64_t i = 0; i < bucket_BHT.numel(); ++i) {
    const auto drawn = rng.uniform() < 0.5 ? 0 : rng.below(static_cast<std::uint64_t>(buckets));
    bucket_BHT.data_ptr<std::int32_t>()[i] = static_cast<std::int32_t>(drawn);
  }
  return bucket_BHT;
}

// Rows of the sections, each by its head and bucket.
std::vector<std::vector<std::int64_t>> sections_of(const at::Tensor& bucket_BHT,
                                                   std::int64_t buckets) {
  const std::int64_t tokens = bucket_BHT.size(2);
  std::vector<std::vector<std::int64_t>> all(
      static_cast<std::size_t>(kSequences * kHeads * buckets));
  const auto* bucket = bucket_BHT.const_data_ptr<std::int32_t>();
  for (std::int64_t head = 0; head < kSequences * kHeads; ++head) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      all[static_cast<std::size_t>(head * buckets + bucket[head * tokens + t])].push_back(
          (head / kHeads * tokens + t) * kHeads + head % kHeads);
    }
  }
  return all;
}

// The form that the CPU takes.
Selection ragged_selection(const std::vector<std::vector<std::int64_t>>& sections) {
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> offsets = {0};
  for (const auto& section : sections) {
    rows.insert(rows.end(), section.begin(), section.end());
    offsets.push_back(std::ssize(rows));
  }
  const at::Tensor all = at::tensor(rows, at::kLong);
  const at::Tensor ends = at::tensor(offsets, at::kLong);
  return {.queries = all,
          .query_offsets = ends,
          .keys = all,
          .key_offsets = ends,
          .mask = Mask::kStrict};
}

// Largest distance in units of the largest expected element.
double selection_distance(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
  EXPECT_EQ(actual.sizes(), expected.sizes());
  const at::Tensor exact = expected.to(at::kDouble);
  return (actual.to(at::kDouble) - exact).abs().max().item<double>() /
         std::max(1e-30, exact.abs().max().item<double>());
}

TEST(GenericBuckets, HaveAPlaceForEachRowInTheOrderOfTokens) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Rng rng(mix_key({0x42554B, seed}));
    const auto tokens = static_cast<std::int64_t>(1 + rng.below(40));
    const auto buckets = static_cast<std::int64_t>(1 + rng.below(9));
    const at::Tensor bucket_BHT = random_buckets(rng, tokens, buckets);
    const auto sections = sections_of(bucket_BHT, buckets);
    const Selection actual = generic::select_buckets(bucket_BHT, buckets);
    std::size_t longest = 0;
    for (const auto& section : sections) longest = std::max(longest, section.size());
    const auto length = static_cast<std::int64_t>(longest);
    ASSERT_EQ(actual.rows_NLS.sizes(),
              (std::vector<std::int64_t>{kSequences * kHeads, length, buckets}));
    ASSERT_EQ(actual.places.numel(), bucket_BHT.numel());
    std::int64_t pairs = 0;
    for (std::size_t s = 0; s < sections.size(); ++s) {
      const auto head = static_cast<std::int64_t>(s) / buckets;
      const auto bucket = static_cast<std::int64_t>(s) % buckets;
      const auto count = std::ssize(sections[s]);
      pairs += count * (count - 1) / 2;
      for (std::int64_t rank = 0; rank < length; ++rank) {
        const std::int64_t place = (head * length + rank) * buckets + bucket;
        const std::int64_t row = actual.rows_NLS.const_data_ptr<std::int64_t>()[place];
        ASSERT_EQ(row, rank < count ? sections[s][static_cast<std::size_t>(rank)] : -1) << seed;
        if (rank >= count) continue;
        ASSERT_EQ(actual.places.const_data_ptr<std::int64_t>()[row], place) << "seed " << seed;
      }
    }
    EXPECT_EQ(actual.pairs.item<std::int64_t>(), pairs);
  }
}

// Each query of a section has its predecessor as key at its place.
TEST(GenericBuckets, ArePackedWithAQueryAndTheKeyBeforeItAtEachPlace) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Rng rng(mix_key({0x5041434B, seed}));
    const auto tokens = static_cast<std::int64_t>(1 + rng.below(40));
    const auto buckets = static_cast<std::int64_t>(1 + rng.below(9));
    const at::Tensor bucket_BHT = random_buckets(rng, tokens, buckets);
    const Selection actual = generic::pack_buckets(bucket_BHT, buckets);
    const std::int64_t rows = bucket_BHT.numel();
    ASSERT_TRUE(actual.packed());
    ASSERT_EQ(actual.packed_rows_2M.sizes(), (std::vector<std::int64_t>{2, rows}));
    ASSERT_EQ(actual.packed_places_2M.sizes(), actual.packed_rows_2M.sizes());
    const auto row_at = actual.packed_rows_2M.accessor<std::int64_t, 2>();
    const auto place_of = actual.packed_places_2M.accessor<std::int64_t, 2>();
    const auto offsets = actual.packed_offsets.accessor<std::int32_t, 1>();
    std::int64_t place = 0;
    std::int64_t s = 0;
    std::int64_t pairs = 0;
    for (const auto& section : sections_of(bucket_BHT, buckets)) {
      ASSERT_EQ(offsets[s++], place) << "seed " << seed;
      pairs += std::ssize(section) * (std::ssize(section) - 1) / 2;
      if (section.empty()) continue;
      ASSERT_EQ(place_of[0][section.back()], -1);
      ASSERT_EQ(place_of[1][section.front()], -1);
      for (std::size_t rank = 0; rank + 1 < section.size(); ++rank, ++place) {
        ASSERT_EQ(row_at[0][place], section[rank]) << "seed " << seed;
        ASSERT_EQ(row_at[1][place], section[rank + 1]) << "seed " << seed;
        ASSERT_EQ(place_of[0][section[rank]], place) << "seed " << seed;
        ASSERT_EQ(place_of[1][section[rank + 1]], place) << "seed " << seed;
      }
    }
    ASSERT_EQ(offsets.size(0), s + 1);
    EXPECT_EQ(offsets[s], place);
    EXPECT_EQ(actual.pairs.item<std::int64_t>(), pairs);
    for (; place < rows; ++place) {  // any row
      ASSERT_TRUE(row_at[0][place] >= 0 && row_at[0][place] < rows);
      ASSERT_TRUE(row_at[1][place] >= 0 && row_at[1][place] < rows);
    }
  }
}

TEST(GenericBuckets, AreNotPackedOnTheCpu) {
  EXPECT_FALSE(generic::can_pack(at::empty({1, 4, 2, 8}), 4));
}

// Products round otherwise on each processor. So ties are of directions along one axis, whose
// products are exact.
TEST(GenericBuckets, AreTheHashesOfTheCpuWithTies) {
  at::Tensor axes_HKS = at::zeros({kHeads, 8, 5});
  for (const int axis : {0, 1, 2}) axes_HKS.select(2, axis).select(1, axis + 3).fill_(1);
  axes_HKS.select(2, 3).copy_(axes_HKS.select(2, 1));
  axes_HKS.select(2, 4).copy_(axes_HKS.select(2, 2)).neg_();
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    at::Tensor x_BTHK = random_tensor({kSequences, 70, kHeads, 8}, 2, type);
    x_BTHK.select(1, 3).zero_();
    const at::Tensor any_HKS = random_tensor({kHeads, 8, 5}, 1);
    EXPECT_TRUE(generic::angular_hashes(x_BTHK, any_HKS).equal(angular_hashes(x_BTHK, any_HKS)))
        << type;
    const at::Tensor expected = angular_hashes(x_BTHK, axes_HKS);
    EXPECT_TRUE(generic::angular_hashes(x_BTHK, axes_HKS).equal(expected)) << type;
    EXPECT_EQ(expected.max().item<std::int32_t>(), 5) << "the lowest of equals";
  }
}

TEST(GenericBuckets, AttendAsOnTheCpuAndSoDoTheirGradients) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    double tolerance = type == at::kDouble ? 1e-13 : 3e-6;
    if (type == at::kBFloat16) tolerance = 1.0 / 64;
    for (const std::int64_t key_heads : {1, 2, 4}) {
      for (const std::int64_t tokens : {1, 2, 67}) {
        for (const std::int64_t buckets : {1, 3, 67}) {
          Rng rng(mix_key({static_cast<std::uint64_t>(tokens * buckets)}));
          const at::Tensor bucket_BHT = random_buckets(rng, tokens, buckets);
          // Parts of wider rows, as GPT-2 has them.
          const at::Tensor q =
              random_tensor({kSequences, tokens, 2, kHeads, 8}, 1, type).select(2, 1);
          const at::Tensor v = random_tensor({kSequences, tokens, key_heads, 8}, 2, type);
          const at::Tensor slope = random_tensor({kSequences, tokens, kHeads, 8}, 3, type);
          q.select(1, 0).zero_();  // of norm 0
          const Selection ragged = ragged_selection(sections_of(bucket_BHT, buckets));
          const Selection padded = generic::select_buckets(bucket_BHT, buckets);
          const auto where = fmt::format("{}, {} key heads, {} tokens, {} buckets",
                                         at::toString(type), key_heads, tokens, buckets);
          EXPECT_EQ(pairs_of(q, padded), pairs_of(q, ragged)) << where;
          const Attention expected = selected_attention(q, {}, v, ragged);
          const Attention actual = selected_attention(q, {}, v, padded);
          EXPECT_LT(selection_distance(actual.out_BTHK, expected.out_BTHK), tolerance) << where;
          const AttentionGradient expected_gradient =
              selected_attention_gradient(slope, q, {}, v, expected, ragged);
          const AttentionGradient gradient =
              selected_attention_gradient(slope, q, {}, v, actual, padded);
          EXPECT_FALSE(gradient.k_BTHK.defined());
          // Through a key of norm 0 comes 1e6 times the gradient. A query with one key has none but
          // by rounding.
          for (const std::int64_t first : {std::int64_t(0), std::int64_t(1)}) {
            if (tokens <= 2) continue;
            const std::int64_t count = first == 0 ? 1 : tokens - 1;
            EXPECT_LT(selection_distance(gradient.q_BTHK.narrow(1, first, count),
                                         expected_gradient.q_BTHK.narrow(1, first, count)),
                      tolerance)
                << where << ", tokens from " << first;
          }
          EXPECT_LT(selection_distance(gradient.v_BTHK, expected_gradient.v_BTHK), tolerance)
              << where;
        }
      }
    }
  }
}

}  // namespace
}  // namespace dynmo::kernels
