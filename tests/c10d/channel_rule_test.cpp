// SPDX-License-Identifier: Apache-2.0
// Which way messages between devices take, by what all ranks say.
#include "dynmo/c10d/channel_rule.h"

#include <gtest/gtest.h>

#include <vector>

namespace dynmo::c10d {
namespace {

constexpr int kOld = 22809;
constexpr int kNew = 23003;

struct RuleCase {
  const char* name;
  std::vector<DeviceOffer> ranks;
  bool has_channels;
  const char* why;
};

DeviceOffer shares(const char* device, int version = kNew) {
  return {.device = device, .version = version, .may_share = true};
}

class ChannelRules : public ::testing::TestWithParam<RuleCase> {};

TEST_P(ChannelRules, SayWhichWayAndWhy) {
  const RuleCase& cell = GetParam();
  const ChannelRule rule = channel_rule(cell.ranks);
  EXPECT_EQ(rule.has_channels, cell.has_channels);
  EXPECT_EQ(rule.why, cell.why);
  for (const DeviceOffer& offer : cell.ranks) {
    const auto again = parse_offer(to_json(offer));
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_EQ(to_json(*again), to_json(offer));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Of, ChannelRules,
    ::testing::Values(
        RuleCase{"one", {{.device = "a", .version = kOld}}, false, "there is one rank"},
        RuleCase{"a_device_each",
                 {{.device = "a", .version = kOld}, {.device = "b", .version = kOld}},
                 true,
                 "NCCL 2.28.9, a device for each rank"},
        RuleCase{"no_library",
                 {{.device = "a", .version = kOld}, {}},
                 false,
                 "not every rank has libdynmo_nccl.so (docs/clusters.md)"},
        RuleCase{"other_versions",
                 {{.device = "a", .version = kOld}, {.device = "b", .version = kNew}},
                 false,
                 "rank 0 has NCCL 2.28.9 and rank 1 has NCCL 2.30.3"},
        RuleCase{"old_and_shared",
                 {shares("a", kOld), shares("a", kOld), shares("b", kOld)},
                 false,
                 "3 ranks share 2 devices: NCCL 2.28.9 refuses that, NCCL 2.30 and newer allow it"},
        RuleCase{"shared_and_not_set",
                 {shares("a"), {.device = "a", .version = kNew}},
                 false,
                 "2 ranks share 1 device: NCCL 2.30.3 allows it where NCCL_MULTI_RANK_GPU_ENABLE=1,"
                 " which rank 1 lacks"},
        RuleCase{"shared", {shares("a"), shares("a")}, true, "NCCL 2.30.3, 2 ranks share 1 device"},
        RuleCase{"two_on_each_of_two",
                 {shares("a"), shares("b"), shares("a"), shares("b")},
                 true,
                 "NCCL 2.30.3, 4 ranks share 2 devices"},
        RuleCase{
            "three_on_one",
            {shares("a"), shares("a"), shares("a")},
            false,
            "3 ranks share 1 device: 3 ranks on one need a smaller NCCL_MAX_CTAS, which rank 0 "
            "lacks"},
        RuleCase{"three_on_one_with_room",
                 {{"a", kNew, true, true}, {"a", kNew, true, true}, {"a", kNew, true, true}},
                 true,
                 "NCCL 2.30.3, 3 ranks share 1 device"}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(ChannelRule, ReadsTheEnvironment) {
  DeviceOffer offer;
  ::unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  ::unsetenv("NCCL_MAX_CTAS");
  read_sharing(offer);
  EXPECT_FALSE(offer.may_share);
  EXPECT_FALSE(offer.limits_ctas);
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0", 1);
  read_sharing(offer);
  EXPECT_FALSE(offer.may_share);
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  ::setenv("NCCL_MAX_CTAS", "4", 1);
  read_sharing(offer);
  EXPECT_TRUE(offer.may_share);
  EXPECT_TRUE(offer.limits_ctas);
  ::unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
  ::unsetenv("NCCL_MAX_CTAS");
}

}  // namespace
}  // namespace dynmo::c10d
