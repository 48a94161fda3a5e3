// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/bit_mask.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "dynmo/core/rng.h"

namespace dynmo {
namespace {

TEST(BitMask, BitsHoldTheOffsets) {
  EXPECT_EQ(pack_mask(std::vector<std::int32_t>{0, 3, 8}, 10),
            (std::vector<std::uint8_t>{0b1001, 0b1}));
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0x534A, seed}));
    std::vector<std::int32_t> offsets(rng.below(200));
    std::iota(offsets.begin(), offsets.end(), 0);
    const std::int64_t elements = std::ssize(offsets);
    std::erase_if(offsets, [&](std::int32_t) { return rng.below(3) == 0; });
    const auto bits = pack_mask(offsets, elements);
    ASSERT_EQ(std::ssize(bits), (elements + 7) / 8) << "seed " << seed;
    ASSERT_EQ(*unpack_mask(bits, elements), offsets) << "seed " << seed;
  }
}

TEST(BitMask, BitsOfAnotherArrayAreRefused) {
  const std::vector<std::uint8_t> bits = {0xFF, 0x05};
  EXPECT_TRUE(unpack_mask(bits, 11));
  EXPECT_EQ(unpack_mask(bits, 17).error(),
            (Error{ErrorCode::kBadInput, "a mask of 2 bytes, wanted 3 for 17 elements"}));
  EXPECT_EQ(unpack_mask(bits, 8).error().message, "a mask of 2 bytes, wanted 1 for 8 elements");
  EXPECT_EQ(
      unpack_mask(bits, 10).error(),
      (Error{ErrorCode::kBadInput, "a mask of 10 elements has bits behind them, wanted zeros"}));
}

TEST(BitMask, BitsAreCounted) {
  EXPECT_EQ(count_bits({}), 0);
  EXPECT_EQ(count_bits(std::vector<std::uint8_t>{0xFF, 0, 0b101}), 10);
}

}  // namespace
}  // namespace dynmo
