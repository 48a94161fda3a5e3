// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <numeric>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/pruning/select_mask.h"

namespace dynmo::dynamism {
namespace {

TEST(PruningMask, BitsHoldTheOffsets) {
  EXPECT_EQ(pack_mask(std::vector<std::int32_t>{0, 3, 8}, 10),
            (std::vector<std::uint8_t>{0b1001, 0b1}));
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x534A, seed}));
    std::vector<std::int32_t> offsets(rng.below(200));
    std::iota(offsets.begin(), offsets.end(), 0);
    const std::int64_t weights = std::ssize(offsets);
    std::erase_if(offsets, [&](std::int32_t) { return rng.below(3) == 0; });
    const auto bits = pack_mask(offsets, weights);
    ASSERT_EQ(std::ssize(bits), (weights + 7) / 8) << "seed " << seed;
    ASSERT_EQ(*unpack_mask(bits, weights), offsets) << "seed " << seed;
  }
}

TEST(PruningMask, BitsOfAnotherMatrixAreRefused) {
  const std::vector<std::uint8_t> bits = {0xFF, 0x05};
  EXPECT_TRUE(unpack_mask(bits, 11));
  EXPECT_EQ(unpack_mask(bits, 17).error(),
            (Error{ErrorCode::kBadInput, "a mask of 2 bytes, wanted 3 for 17 weights"}));
  EXPECT_EQ(unpack_mask(bits, 8).error().message, "a mask of 2 bytes, wanted 1 for 8 weights");
  EXPECT_EQ(
      unpack_mask(bits, 10).error(),
      (Error{ErrorCode::kBadInput, "a mask of 10 weights has bits behind them, wanted zeros"}));
}

TEST(PruningMask, DigestsTellMasksApartButNotTheirOrder) {
  const SumOverRanks alone = [](std::vector<std::int64_t> message) { return message; };
  const std::vector<MatrixMask> masks = {{0, 8, {0x0F}}, {1, 8, {0xF0}}, {2, 16, {1, 2}}};
  const Digest digest = *digest_of_masks(masks, alone);
  EXPECT_EQ(*digest_of_masks(std::vector{masks[2], masks[0], masks[1]}, alone), digest);
  auto other = masks;
  other[2].bits[1] = 3;
  EXPECT_NE(*digest_of_masks(other, alone), digest);
  other = masks;
  std::swap(other[0].bits, other[1].bits);
  EXPECT_NE(*digest_of_masks(other, alone), digest);
  other = masks;
  other[2].weights = 15;
  EXPECT_NE(*digest_of_masks(other, alone), digest);
  other.pop_back();
  EXPECT_NE(*digest_of_masks(other, alone), digest);
}

}  // namespace
}  // namespace dynmo::dynamism
