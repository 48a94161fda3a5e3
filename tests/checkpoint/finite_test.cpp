// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "dynmo/checkpoint/safetensors.h"

namespace dynmo::checkpoint {
namespace {

TensorView view(DType dtype, std::span<const std::byte> bytes, std::int64_t elements) {
  return {.name = "t", .dtype = dtype, .shape = {elements}, .bytes = bytes};
}

TEST(FindNotFinite, NamesTheFirstAndCountsAll) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<float> values(10000, 1.5F);
  values[3] = std::numeric_limits<float>::max();
  values[4] = -std::numeric_limits<float>::denorm_min();
  const auto bytes = std::as_bytes(std::span(values));
  EXPECT_FALSE(find_not_finite(view(DType::kF32, bytes, 10000)));
  for (const float bad : {kInf, -kInf, std::nanf("")}) {
    values[9001] = bad;
    values[9999] = kInf;
    const auto found = find_not_finite(view(DType::kF32, bytes, 10000));
    ASSERT_TRUE(found);
    EXPECT_EQ(found->first, 9001);
    EXPECT_EQ(found->count, 2);
  }
}

TEST(FindNotFinite, ReadsHalvesAndUnalignedBytes) {
  struct Case {
    DType dtype;
    std::uint16_t max, inf, nan;
  };
  for (const Case& c :
       {Case{DType::kF16, 0x7BFF, 0xFC00, 0x7E01}, Case{DType::kBF16, 0x7F7F, 0xFF80, 0x7FC0}}) {
    std::vector<std::byte> bytes(1 + 2 * 5);
    const auto set = [&](std::size_t i, std::uint16_t bits) {
      std::memcpy(bytes.data() + 1 + 2 * i, &bits, sizeof bits);
    };
    for (std::size_t i = 0; i < 5; ++i) set(i, c.max);
    const TensorView tensor = view(c.dtype, std::span(bytes).subspan(1), 5);
    EXPECT_FALSE(find_not_finite(tensor));
    set(4, c.inf);
    EXPECT_EQ(find_not_finite(tensor)->first, 4);
    set(2, c.nan);
    EXPECT_EQ(find_not_finite(tensor)->first, 2);
    EXPECT_EQ(find_not_finite(tensor)->count, 2);
  }
}

}  // namespace
}  // namespace dynmo::checkpoint
