// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "dynmo/process/line_merger_impl.h"

namespace dynmo::process {
namespace {

TEST(LineMerger, PutsTheRankInFrontOfWholeLines) {
  LineMerger merger;
  EXPECT_EQ(merger.feed(WorldRank(2), "loss 3"), "");
  EXPECT_EQ(merger.feed(WorldRank(1), "a\n"), "[rank 1] a\n");
  EXPECT_EQ(merger.feed(WorldRank(2), ".5\n\nrest"), "[rank 2] loss 3.5\n[rank 2] \n");
  EXPECT_EQ(merger.feed(WorldRank(0), "plain\n"), "plain\n");
  EXPECT_EQ(merger.finish(WorldRank(2)), "[rank 2] rest\n");
  EXPECT_EQ(merger.finish(WorldRank(2)), "");
}

TEST(LineMerger, ShowsOneErrorOfSeveralRanksOnce) {
  LineMerger merger;
  EXPECT_EQ(merger.feed(WorldRank(1), "dynmo: no data\n"), "[rank 1] dynmo: no data\n");
  EXPECT_EQ(merger.feed(WorldRank(0), "dynmo: no data\n"), "");
  EXPECT_EQ(merger.feed(WorldRank(2), "dynmo: rank 1: no data\n"), "");
  EXPECT_EQ(merger.feed(WorldRank(2), "dynmo: other\n"), "[rank 2] dynmo: other\n");
  EXPECT_TRUE(merger.has_explained(WorldRank(0)));
  EXPECT_FALSE(merger.has_explained(WorldRank(3)));
}

TEST(LineMerger, ShowsANoteOfSeveralRanksOnceAndTakesItForNoReasonToEnd) {
  LineMerger merger;
  const std::string note = "dynmo: note: no locks (Not supported): beware ('/run";
  EXPECT_EQ(merger.feed(WorldRank(0), note + "')\n"), note + "')\n");
  EXPECT_EQ(merger.feed(WorldRank(1), note + "/checkpoints')\n"), "");
  EXPECT_NE(merger.feed(WorldRank(1), "dynmo: note: another (Not supported): b ('/run')\n"), "");
  EXPECT_FALSE(merger.has_explained(WorldRank(0)));
  EXPECT_FALSE(merger.has_explained(WorldRank(1)));
}

TEST(LineMerger, ShowsOneLossOnceHoweverItWasNoticed) {
  LineMerger merger;
  EXPECT_NE(
      merger.feed(WorldRank(1), "dynmo: rank 0 was lost: nothing was heard of it for 3.0 s\n"), "");
  EXPECT_EQ(merger.feed(WorldRank(2), "dynmo: rank 0 was lost: its connection closed\n"), "");
  EXPECT_NE(merger.feed(WorldRank(2), "dynmo: rank 3 was lost: its connection closed\n"), "");
}

TEST(LineMerger, KeepsWhatARankRepeatsItselfAndWhatIsNotOurs) {
  LineMerger merger;
  EXPECT_EQ(merger.feed(WorldRank(0), "dynmo: slow\ndynmo: slow\n"), "dynmo: slow\ndynmo: slow\n");
  EXPECT_EQ(merger.feed(WorldRank(0), "warning\n"), "warning\n");
  EXPECT_EQ(merger.feed(WorldRank(1), "warning\n"), "[rank 1] warning\n");
}

TEST(LineMerger, LeavesOutTheLossOfARankWhoseEndWasSaid) {
  LineMerger merger;
  merger.expect_loss_of(WorldRank(1));
  EXPECT_EQ(merger.feed(WorldRank(0), "dynmo: rank 1 was lost: its connection closed\n"), "");
  EXPECT_EQ(merger.feed(WorldRank(0), "dynmo: rank 12 was lost: its connection closed\n"),
            "dynmo: rank 12 was lost: its connection closed\n");
  EXPECT_TRUE(merger.has_explained(WorldRank(0)));
}

TEST(LineMerger, TakesAnErrorOfTheCommandLineForTheSameReason) {
  LineMerger merger;
  merger.expect_loss_of(WorldRank(1));
  EXPECT_EQ(merger.feed(WorldRank(0), "dynmo: error: rank 1 was lost: its connection closed\n"),
            "");
  EXPECT_NE(merger.feed(WorldRank(0), "dynmo: error: no data\n"), "");
  EXPECT_EQ(merger.feed(WorldRank(2), "dynmo: error: rank 0: no data\n"), "");
  EXPECT_EQ(merger.feed(WorldRank(3), "dynmo: no data\n"), "");
}

TEST(LineMerger, CutsALineWithoutEnd) {
  LineMerger merger;
  std::size_t shown = 0;
  for (int i = 0; i < 100; ++i) shown += merger.feed(WorldRank(0), std::string(4096, 'x')).size();
  EXPECT_GE(shown, 300000U);
}

}  // namespace
}  // namespace dynmo::process
