// SPDX-License-Identifier: Apache-2.0
#include "dynmo/observe/picture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::observe {
namespace {

using schedule::ActionKind;
using schedule::TimedAction;
using schedule::Timeline;

TimedAction timed(ActionKind kind, int stage, int micro_batch, std::int64_t start,
                  std::int64_t end) {
  return {{kind, StageId{stage}, MicroBatchId{micro_batch}}, Nanoseconds{start}, Nanoseconds{end}};
}

// F = 1, B = 2 on each of `ranks` stages.
Timeline one_f_one_b(int ranks, int micro_batches) {
  schedule::PipelineShape shape{.ranks = ranks, .micro_batches = micro_batches, .stages = {}};
  for (int r = 0; r < ranks; ++r) shape.stages.push_back({.rank = Rank{r}});
  const auto made = schedule::make_schedule(schedule::ScheduleKind::k1F1B, shape);
  std::vector<sim::StageCost> costs(static_cast<std::size_t>(ranks));
  for (sim::StageCost& cost : costs) {
    cost.forward = cost.input_gradient = cost.weight_gradient = Nanoseconds{1000};
  }
  return sim::simulate(schedule::lower(*made), costs, cost::equal_ranks(ranks), {.timeline = true})
      ->timeline;
}

TEST(Picture, NamesMicroBatchesWhereThereIsRoom) {
  EXPECT_EQ(picture(one_f_one_b(3, 2), {.width = 57, .ascii = true}),
            "rank 0 |F0--F1--....................B0------....B1------|\n"
            "rank 1 |....F0--F1--........B0------....B1------........|\n"
            "rank 2 |........F0--B0------F1--B1------................|\n"
            "        0                                       12.00 us\n"
            "        F forward, B both, . idle\n");
}

TEST(Picture, DrawsWithUtf8UnlessAsked) {
  EXPECT_EQ(picture(one_f_one_b(1, 2), {.width = 57}),
            "rank 0 │F0──────B0──────────────F1──────B1──────────────│\n"
            "        0                                        6.00 us\n"
            "        F forward, B both, · idle\n");
}

TEST(Picture, ShowsWhatFillsMostOfAColumn) {
  EXPECT_EQ(picture(one_f_one_b(2, 8), {.width = 63, .ascii = true}),
            "rank 0 |FFFF....BBBBFFBBBBFFBBBBFFBBBBFFBBBBFFBBBBFFBBBB..BBBB|\n"
            "rank 1 |..FFBBBBFFBBBBFFBBBBFFBBBBFFBBBBFFBBBBFFBBBBFFBBBB....|\n"
            "        0                                             27.00 us\n"
            "        F forward, B both, . idle\n");
}

TEST(Picture, LowerCaseIsNotTheRanksFirstStage) {
  Timeline timeline;
  timeline.ranks = {
      {timed(ActionKind::kForward, 0, 0, 0, 10), timed(ActionKind::kForward, 3, 0, 10, 20),
       timed(ActionKind::kInputGradient, 3, 0, 20, 30),
       timed(ActionKind::kSendGradient, 3, 0, 30, 70),
       timed(ActionKind::kWeightGradient, 0, 0, 60, 70)},
      {}};
  EXPECT_EQ(picture(timeline, {.width = 44, .ascii = true}),
            "rank 0 |F0---f0---i0---...............W0---|\n"
            "rank 1 |...................................|\n"
            "        0                             70 ns\n"
            "        F forward, I input gradient, W weight gradient, lower case: later stages of a "
            "rank, . idle\n");
}

TEST(Picture, LeavesOutRanksInTheMiddle) {
  const std::string drawn = picture(one_f_one_b(12, 2), {.width = 60, .rows = 3, .ascii = true});
  std::istringstream lines(drawn);
  std::vector<std::string> starts;
  for (std::string line; std::getline(lines, line);) starts.push_back(line.substr(0, 24));
  ASSERT_EQ(starts.size(), 6U);
  EXPECT_EQ(starts[0].substr(0, 9), "rank 0  |");
  EXPECT_EQ(starts[1].substr(0, 9), "rank 1  |");
  EXPECT_EQ(starts[2], "    ... (9 more ranks)");
  EXPECT_EQ(starts[3].substr(0, 9), "rank 11 |");
}

TEST(Picture, NothingRanNothingDrawn) {
  EXPECT_EQ(picture({}), "");
  EXPECT_EQ(picture({.ranks = {{}, {}}}), "");
  EXPECT_THROW((void)picture({}, {.width = 39}), CheckFailure);
}

// The share of letters is the share of time, but for the rounding of a column an edge.
TEST(Picture, CountsOfColumnsFollowTime) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Rng rng(seed);
    Timeline timeline;
    timeline.ranks.resize(1 + rng.below(3));
    std::int64_t end = 1;
    for (auto& rank : timeline.ranks) {
      std::int64_t now = 0;
      for (std::uint64_t a = rng.below(80); a > 0; --a) {
        now += static_cast<std::int64_t>(rng.below(3) == 0 ? rng.below(5000) : 0);
        const auto kind = static_cast<ActionKind>(rng.below(4));
        const auto stop = now + static_cast<std::int64_t>(rng.below(10000));
        rank.push_back(timed(kind, static_cast<int>(rng.below(2)), static_cast<int>(a), now, stop));
        now = stop;
      }
      end = std::max(end, now);
    }
    const std::string drawn = picture(timeline, {.width = 2000, .ascii = true});
    std::istringstream lines(drawn);
    for (const auto& rank : timeline.ranks) {
      std::string line;
      if (!std::getline(lines, line)) break;  // nothing ran
      std::int64_t busy = 0;
      for (const TimedAction& action : rank) busy += (action.end - action.start).count();
      const auto dots = std::count(line.begin(), line.end(), '.');
      ASSERT_EQ(line.size(), 2000U) << "seed " << seed;
      const double columns = 2000.0 - 9;
      EXPECT_NEAR(static_cast<double>(dots),
                  columns - static_cast<double>(busy) / static_cast<double>(end) * columns,
                  static_cast<double>(rank.size()) + 1)
          << "seed " << seed << '\n'
          << line;
    }
  }
}

}  // namespace
}  // namespace dynmo::observe
