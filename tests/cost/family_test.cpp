// SPDX-License-Identifier: Apache-2.0
#include "dynmo/cost/family.h"

#include <gtest/gtest.h>

namespace dynmo::cost {
namespace {

TEST(Precision, AnUnknownNameIsRefusedWithTheKnownOnes) {
  EXPECT_EQ(parse_precision("fp32").value(), Precision::kFp32);
  EXPECT_EQ(parse_precision("bf16").value(), Precision::kBf16);
  const auto refused = parse_precision("fp16");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message, "'fp16' is no precision, wanted fp32 or bf16");
}

}  // namespace
}  // namespace dynmo::cost
