// SPDX-License-Identifier: Apache-2.0
#include "dynmo/core/traffic.h"

#include <gtest/gtest.h>

namespace dynmo {
namespace {

TEST(TrafficRows, RowsOfTheSameRanksAndPurposeAreOne) {
  const WorldRank a(0);
  const WorldRank b(1);
  const TrafficRows sums = sums_of({{b, a, Purpose::kGradient, {1, Bytes{5}}},
                                    {a, b, Purpose::kMigration, {0, Bytes{0}}},
                                    {a, b, Purpose::kGradient, {2, Bytes{7}}},
                                    {b, a, Purpose::kGradient, {3, Bytes{1}}},
                                    {a, b, Purpose::kActivation, {1, Bytes{0}}}});
  const TrafficRows expected = {{a, b, Purpose::kActivation, {1, Bytes{0}}},
                                {a, b, Purpose::kGradient, {2, Bytes{7}}},
                                {b, a, Purpose::kGradient, {4, Bytes{6}}}};
  EXPECT_EQ(sums, expected);
  EXPECT_EQ(traffic_json(sums)[2].dump(),
            R"({"from":1,"to":0,"purpose":"gradient","messages":4,"bytes":6})");
}

TEST(TrafficRows, PurposesHaveNames) {
  for (const Purpose purpose : kPurposes) EXPECT_EQ(parse_purpose(name(purpose)).value(), purpose);
  EXPECT_EQ(parse_purpose("gossip").error().message,
            "purpose is 'gossip', wanted activation, gradient, reduction, migration or control");
}

}  // namespace
}  // namespace dynmo
