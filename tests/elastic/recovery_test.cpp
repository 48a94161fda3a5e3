// SPDX-License-Identifier: Apache-2.0
#include "dynmo/elastic/recovery.h"

#include <gtest/gtest.h>

namespace dynmo::elastic {
namespace {

Report report_of(int number, std::int64_t step, std::vector<Holding> holdings) {
  return {.member = {.id = {static_cast<std::uint64_t>(number) + 1}, .number = number},
          .step = step,
          .holdings = std::move(holdings)};
}

Holding held(int layer, std::int64_t step, CopyKind kind = CopyKind::kLive) {
  return {.layer = LayerId(layer), .step = step, .kind = kind};
}

TEST(Recover, GoesOnAtTheStepOfLiveLayers) {
  const auto decision = recover(
      {.layers = 2}, std::vector{report_of(0, 7, {held(0, 7)}), report_of(1, 7, {held(1, 7)})});
  ASSERT_TRUE(decision.has_value());
  EXPECT_EQ(decision->origin, Origin::kMemory);
  EXPECT_EQ(decision->step, 7);
  EXPECT_FALSE(decision->finish.has_value());
}

TEST(Recover, FinishesAnUpdateThatOthersHaveMade) {
  Report ahead = report_of(0, 8, {held(0, 8)});
  ahead.updated = UpdateRecord{.step = 7, .exchange = "1.5"};
  Report behind = report_of(1, 7, {held(1, 7)});
  behind.gradients_complete = true;
  const auto decision = recover({.layers = 2}, std::vector{ahead, behind});
  ASSERT_TRUE(decision.has_value());
  EXPECT_EQ(decision->step, 8);
  EXPECT_EQ(decision->finish, ahead.updated);
  behind.gradients_complete = false;  // then its layer is of step 7 only, and 0 has none of it
  EXPECT_EQ(recover({.layers = 2}, std::vector{ahead, behind})->origin, Origin::kInitial);
}

TEST(Recover, TakesAnUpdateFromAnIdleRank) {
  Report idle = report_of(2, 8, {});
  idle.updated = UpdateRecord{.step = 7, .exchange = "1.5"};
  Report behind = report_of(1, 7, {held(0, 7)});
  behind.gradients_complete = true;
  EXPECT_EQ(recover({.layers = 1}, std::vector{behind, idle})->step, 8);
}

TEST(Recover, MixesLiveLayersShadowsAndCopiesOfOneStep) {
  const auto decision = recover(
      {.layers = 3}, std::vector{report_of(0, 4, {held(0, 4), held(1, 4, CopyKind::kShadow)}),
                                 report_of(1, 4, {held(1, 4), held(2, 4, CopyKind::kNeighbour)})});
  ASSERT_TRUE(decision.has_value());
  EXPECT_EQ(decision->step, 4);
  EXPECT_EQ(decision->origin, Origin::kMemory);
}

TEST(Recover, GoesBackToTheSnapshotWhereALayerIsLost) {
  const auto decision = recover(
      {.layers = 2},
      std::vector{report_of(
          0, 7, {held(0, 7), held(0, 4, CopyKind::kOwn), held(1, 4, CopyKind::kNeighbour)})});
  ASSERT_TRUE(decision.has_value());
  EXPECT_EQ(decision->step, 4);
  EXPECT_EQ(decision->origin, Origin::kMemory);
}

TEST(Recover, PrefersACheckpointToAnOlderSnapshotOnly) {
  Report report =
      report_of(0, 7, {held(0, 7), held(0, 4, CopyKind::kOwn), held(1, 4, CopyKind::kNeighbour)});
  report.checkpoint = 4;
  EXPECT_EQ(recover({.layers = 2}, std::vector{report})->origin, Origin::kMemory);
  report.checkpoint = 5;
  const auto decision = recover({.layers = 2}, std::vector{report});
  EXPECT_EQ(decision->origin, Origin::kCheckpoint);
  EXPECT_EQ(decision->step, 5);
}

TEST(Recover, BeginsAgainOnlyWhereInitialValuesAreAFunctionOfTheSeed) {
  const std::vector reports{report_of(0, 7, {held(0, 7)})};
  EXPECT_EQ(recover({.layers = 2}, reports)->origin, Origin::kInitial);
  const auto refused = recover({.layers = 2, .initial_values = false}, reports);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kNoCheckpoint);
}

}  // namespace
}  // namespace dynmo::elastic
