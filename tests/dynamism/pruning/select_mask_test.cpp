// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "dynmo/dynamism/pruning/select.h"

namespace dynmo::dynamism {
namespace {

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
