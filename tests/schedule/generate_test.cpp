// SPDX-License-Identifier: Apache-2.0
#include "dynmo/schedule/generate.h"

#include <gtest/gtest.h>

#include "dynmo/schedule/check.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/schedule/text.h"
#include "tests/schedule/random_pipelines.h"

namespace dynmo::schedule {
namespace {

using testing::even_shape;
using testing::random_crowded_shape;

std::string grid(ScheduleKind kind, const PipelineShape& shape) {
  return to_grid(*make_schedule(kind, shape));
}

TEST(Shape, RefusesWhatIsNoPipeline) {
  PipelineShape shape = even_shape(3, 4);
  EXPECT_TRUE(validate(shape));
  const auto message = [](const PipelineShape& bad) { return validate(bad).error().message; };
  shape.ranks = 0;
  EXPECT_EQ(message(shape), "a pipeline of 0 ranks; want at least 1");
  shape.ranks = 2;
  EXPECT_EQ(message(shape), "stage 2 is on rank 2; want a rank below 2");
  shape = even_shape(3, 0);
  EXPECT_EQ(message(shape), "0 micro-batches; want at least 1");
  shape = even_shape(0, 1);
  shape.ranks = 1;
  EXPECT_EQ(message(shape), "a pipeline without stages; want at least 1");
  shape = even_shape(3, 4);
  shape.stages[1].frozen = true;
  EXPECT_EQ(message(shape),
            "stage 1 is frozen but stage 0 before it is not; only the first stages of a model can "
            "be frozen");
  EXPECT_EQ(message(even_shape(2, 2147483647)),
            "2 stages x 2147483647 micro-batches; want a product up to 134217728");
  EXPECT_FALSE(make_schedule(ScheduleKind::k1F1B, shape));
  EXPECT_FALSE(make_forward_schedule(shape));
}

TEST(ScheduleKindName, ReadsBackAndSuggests) {
  for (const ScheduleKind kind : testing::kTemplates) {
    EXPECT_EQ(*parse_schedule_kind(name(kind)), kind);
  }
  EXPECT_EQ(parse_schedule_kind("gpip").error().message,
            "'gpip' is not a schedule, did you mean 'gpipe'?");
  EXPECT_EQ(parse_schedule_kind("interleaving").error().code, ErrorCode::kBadInput);
}

TEST(Gpipe, RunsAllForwardsThenAllBackwardsInMicroBatchOrder) {
  EXPECT_EQ(grid(ScheduleKind::kGpipe, even_shape(2, 3)),
            "rank 0 | 0F0 0F1 0F2 0B0 0B1 0B2\n"
            "rank 1 | 1F0 1F1 1F2 1B0 1B1 1B2\n");
}

TEST(OneForwardOneBackward, WarmsUpByTheStagesBehind) {
  EXPECT_EQ(grid(ScheduleKind::k1F1B, even_shape(3, 4)),
            "rank 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
            "rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
            "rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3\n");
}

TEST(OneForwardOneBackward, TakesFewerMicroBatchesThanStages) {
  EXPECT_EQ(grid(ScheduleKind::k1F1B, even_shape(4, 2)),
            "rank 0 | 0F0 0F1 0B0 0B1\n"
            "rank 1 | 1F0 1F1 1B0 1B1\n"
            "rank 2 | 2F0 2F1 2B0 2B1\n"
            "rank 3 | 3F0 3B0 3F1 3B1\n");
  EXPECT_EQ(grid(ScheduleKind::k1F1B, even_shape(2, 1)),
            "rank 0 | 0F0 0B0\n"
            "rank 1 | 1F0 1B0\n");
  EXPECT_EQ(grid(ScheduleKind::k1F1B, even_shape(1, 2)), "rank 0 | 0F0 0B0 0F1 0B1\n");
}

TEST(OneForwardOneBackward, RunsAFrozenPrefixForwardOnly) {
  EXPECT_EQ(grid(ScheduleKind::k1F1B, even_shape(4, 3, 2)),
            "rank 0 | 0F0 0F1 0F2\n"
            "rank 1 | 1F0 1F1 1F2\n"
            "rank 2 | 2F0 2F1 2B0 2F2 2B1 2B2\n"
            "rank 3 | 3F0 3B0 3F1 3B1 3F2 3B2\n");
  EXPECT_EQ(grid(ScheduleKind::kGpipe, even_shape(2, 2, 2)),
            "rank 0 | 0F0 0F1\n"
            "rank 1 | 1F0 1F1\n");
}

TEST(OneForwardOneBackward, FollowsTheStagesOverIdleAndShuffledRanks) {
  const PipelineShape shape{
      .ranks = 5, .micro_batches = 2, .stages = {{.rank = Rank{3}}, {.rank = Rank{1}}}};
  EXPECT_EQ(grid(ScheduleKind::k1F1B, shape),
            "rank 0 | idle\n"
            "rank 1 | 1F0 1B0 1F1 1B1\n"
            "rank 2 | idle\n"
            "rank 3 | 0F0 0F1 0B0 0B1\n"
            "rank 4 | idle\n");
}

// Stages on the given ranks, in order.
PipelineShape placed(const std::vector<int>& ranks, int micro_batches, int frozen = 0) {
  PipelineShape shape{.ranks = 4, .micro_batches = micro_batches, .stages = {}};
  for (const int rank : ranks) {
    shape.stages.push_back(
        {.rank = Rank{rank}, .frozen = static_cast<int>(shape.stages.size()) < frozen});
  }
  return shape;
}

std::string refusal(ScheduleKind kind, const PipelineShape& shape, ScheduleOptions options = {}) {
  const Expected<Schedule> made = make_schedule(kind, shape, options);
  return made ? "made" : made.error().message;
}

TEST(Interleaved, TakesTurnsOnTheStagesOfARank) {
  EXPECT_EQ(grid(ScheduleKind::kInterleaved, placed({2, 0, 2, 0}, 4)),
            "rank 0 | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3\n"
            "rank 1 | idle\n"
            "rank 2 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n"
            "rank 3 | idle\n");
}

TEST(Interleaved, IsOneForwardOneBackwardWithOneStageARank) {
  const PipelineShape shape = placed({3, 1, 0}, 5, 1);
  for (const int group_size : {0, 5, -1}) {
    EXPECT_EQ(make_schedule(ScheduleKind::kInterleaved, shape, {.group_size = group_size})->ranks,
              make_schedule(ScheduleKind::k1F1B, shape)->ranks);
  }
}

TEST(Interleaved, SaysWhatMicroBatchesAndPlacementItTakes) {
  const auto kind = ScheduleKind::kInterleaved;
  EXPECT_EQ(refusal(kind, placed({0, 1, 0, 1}, 5)),
            "interleaved takes no 5 micro-batches in groups of 2 over 2 ranks; want 4 or 6 "
            "micro-batches");
  EXPECT_EQ(refusal(kind, placed({0, 1, 0, 1}, 1)),
            "interleaved takes no 1 micro-batches in groups of 2 over 2 ranks; want 2 "
            "micro-batches");
  EXPECT_EQ(refusal(kind, placed({0, 1, 0, 1}, 7), {.group_size = 3}),
            "interleaved takes no 7 micro-batches in groups of 3 over 2 ranks; want 6 or 8 "
            "micro-batches");
  EXPECT_EQ(refusal(kind, placed({0, 1, 0, 1}, 8), {.group_size = 3}), "made");
  EXPECT_EQ(refusal(kind, placed({0, 1, 0, 1}, 4), {.group_size = 1}),
            "interleaved in groups of 1 micro-batches over 2 ranks; want groups of at least 2");
  EXPECT_EQ(refusal(kind, placed({0, 1, 0}, 4)),
            "3 stages on 2 ranks; interleaved wants as many stages on every rank that has any, "
            "none of them empty");
  EXPECT_EQ(refusal(kind, placed({0, 1, 1, 0}, 4)),
            "stage 2 is on rank 1; interleaved wants it on rank 0, stages in a loop over the 2 "
            "ranks");
}

TEST(ZbH1, PutsWeightGradientsOffByTheStagesAhead) {
  EXPECT_EQ(grid(ScheduleKind::kZbH1, even_shape(3, 4)),
            "rank 0 | 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3\n"
            "rank 1 | 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3\n"
            "rank 2 | 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3\n");
}

TEST(ZbV, GoesThereAndBack) {
  EXPECT_EQ(grid(ScheduleKind::kZbV, placed({0, 3, 3, 0}, 4)),
            "rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 "
            "3W3 0I2 0W2 0I3 0W3\n"
            "rank 1 | idle\n"
            "rank 2 | idle\n"
            "rank 3 | 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 "
            "2I3 1I3 1W2 2W3 1W3\n");
}

TEST(ZbV, TakesFewMicroBatchesAMiddleInOneStageAndMissingStages) {
  EXPECT_EQ(grid(ScheduleKind::kZbV, placed({0, 1, 0}, 2, 1)),
            "rank 0 | 0F0 0F1 2F0 2I0 2W0 2F1 2I1 2W1\n"
            "rank 1 | 1F0 1F1 1I0 1W0 1I1 1W1\n"
            "rank 2 | idle\n"
            "rank 3 | idle\n");
  for (const std::vector<int>& ranks : std::vector<std::vector<int>>{
           {2}, {0, 1, 2, 1, 0}, {0, 1, 2, 2}, {1, 1, 3}, {0, 1, 2, 3, 0}}) {
    EXPECT_EQ(explain(lower(*make_schedule(ScheduleKind::kZbV, placed(ranks, 3)))), "");
  }
}

TEST(ZbV, SaysWhatPlacementItTakes) {
  const auto kind = ScheduleKind::kZbV;
  const std::string want = "; zb-v wants the stages there and back over the ranks: 0 1 2 2 1 0";
  EXPECT_EQ(refusal(kind, placed({0, 1, 0, 1}, 4)),
            "stages 0 and 2 on one rank and 1 and 3 on another do not nest" + want);
  EXPECT_EQ(refusal(kind, placed({0, 1, 0, 0}, 4)), "stages 0, 2 and 3 are on rank 0" + want);
  EXPECT_EQ(refusal(kind, placed({0, 1, 2}, 4)), "no rank holds two stages" + want);
}

TEST(Adaptive, IsGivenByNoShape) {
  EXPECT_EQ(refusal(ScheduleKind::kAdaptive, even_shape(2, 2)),
            "no shape alone gives an adaptive order; take it from a plan that carries one");
}

TEST(Generators, RefuseSeveralStagesOnARank) {
  const PipelineShape shape{
      .ranks = 2, .micro_batches = 2, .stages = {{.rank = Rank{1}}, {.rank = Rank{1}}}};
  EXPECT_EQ(make_schedule(ScheduleKind::k1F1B, shape).error().message,
            "stages 0 and 1 are both on rank 1; 1f1b wants at most one stage a rank");
}

TEST(ForwardSchedule, RunsForwardOnlyAlsoWithSeveralStagesOnARank) {
  const PipelineShape shape{
      .ranks = 2,
      .micro_batches = 2,
      .stages = {{.rank = Rank{0}}, {.rank = Rank{1}}, {.rank = Rank{1}}, {.rank = Rank{0}}}};
  const Schedule forward = *make_forward_schedule(shape);
  EXPECT_EQ(to_grid(forward),
            "rank 0 | 0F0 0F1 3F0 3F1\n"
            "rank 1 | 1F0 1F1 2F0 2F1\n");
  EXPECT_EQ(to_grid(lower(forward)),
            "rank 0 | 0F0      0SEND_F0 3RECV_F0 0F1 0SEND_F1 3RECV_F1 3F0 3F1\n"
            "rank 1 | 1RECV_F0 1RECV_F1 1F0      1F1 2F0      2SEND_F0 2F1 2SEND_F1\n");
}

TEST(Lowering, PostsReceivesOneActionAheadAndSendsAtOnce) {
  EXPECT_EQ(to_grid(lower(*make_schedule(ScheduleKind::k1F1B, even_shape(2, 2)))),
            "rank 0 | 0F0      0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1\n"
            "rank 1 | 1RECV_F0 1F0      1RECV_F1 1B0 1SEND_B0 1F1      1B1 1SEND_B1\n");
}

TEST(Lowering, SendsNoGradientToAFrozenStageAndNothingWithinARank) {
  EXPECT_EQ(to_grid(lower(*make_schedule(ScheduleKind::k1F1B, even_shape(3, 1, 1)))),
            "rank 0 | 0F0      0SEND_F0\n"
            "rank 1 | 1RECV_F0 1RECV_B0 1F0 1SEND_F0 1B0\n"
            "rank 2 | 2RECV_F0 2F0      2B0 2SEND_B0\n");
  const PipelineShape together{
      .ranks = 1, .micro_batches = 1, .stages = {{.rank = Rank{0}}, {.rank = Rank{0}}}};
  const Schedule compute{
      .shape = together,
      .ranks = {{*parse_action("0F0"), *parse_action("1F0"), *parse_action("1B0"),
                 *parse_action("0I0"), *parse_action("0W0")}},
      .lowered = false};
  EXPECT_EQ(to_grid(lower(compute)), "rank 0 | 0F0 1F0 1B0 0I0 0W0\n");
  EXPECT_TRUE(check(lower(compute)));
}

TEST(Lowering, NumbersEveryBoundaryAndDirectionApart) {
  const PipelineShape shape = even_shape(4, 1);
  EXPECT_EQ(channel_count(shape), 6);
  std::vector<int> ends(6, 0);
  for (const auto& list : lower(*make_schedule(ScheduleKind::kGpipe, shape)).ranks) {
    for (const Action& a : list) {
      if (is_compute(a.kind)) continue;
      EXPECT_EQ(channel(a), channel(peer(a))) << to_string(a);
      EXPECT_EQ(peer(peer(a)), a);
      ++ends.at(static_cast<std::size_t>(channel(a)));
    }
  }
  EXPECT_EQ(ends, std::vector<int>(6, 2));
}

// The most micro-batches of a stage in flight, by the table in docs/schedules.md.
int max_in_flight(ScheduleKind kind, const PipelineShape& shape, int stage) {
  const int stages = static_cast<int>(shape.stages.size());
  if (shape.stages[static_cast<std::size_t>(stage)].frozen) return 0;
  if (kind == ScheduleKind::k1F1B) return std::min(shape.micro_batches, stages - stage);
  if (kind == ScheduleKind::kZbH1) return std::min(shape.micro_batches, stages);
  return shape.micro_batches;
}

TEST(Generators, MakeValidSchedulesOfTenThousandUnevenPipelines) {
  for (std::uint64_t seed = 0; seed < 10000; ++seed) {
    Rng rng(mix_key({11, seed}));
    const ScheduleKind kind = testing::kTemplates[seed % testing::kTemplates.size()];
    const auto [shape, options] = testing::random_pipeline(rng, kind);
    const Expected<Schedule> made = make_schedule(kind, shape, options);
    ASSERT_TRUE(made) << "seed " << seed << ": " << made.error().message;
    const Expected<ScheduleFacts> facts = check(lower(*made));
    ASSERT_TRUE(facts) << "seed " << seed << ": " << facts.error().message << to_grid(*made);
    for (int s = 0; s < static_cast<int>(shape.stages.size()); ++s) {
      const int in_flight = facts->in_flight[static_cast<std::size_t>(s)];
      const int most = max_in_flight(kind, shape, s);
      const bool exact = kind == ScheduleKind::kGpipe || kind == ScheduleKind::k1F1B;
      EXPECT_TRUE(exact ? in_flight == most : in_flight <= most)
          << "seed " << seed << ", stage " << s << ": " << in_flight << ", most " << most;
    }
  }
}

TEST(Lowering, KeepsAnyOrderThatRanValid) {
  for (std::uint64_t seed = 0; seed < 2000; ++seed) {
    Rng rng(mix_key({12, seed}));
    const PipelineShape shape = random_crowded_shape(rng);
    const Schedule lowered = lower(testing::random_schedule(rng, shape));
    ASSERT_EQ(explain(lowered), "") << "seed " << seed;
    ASSERT_EQ(explain(lower(*make_forward_schedule(shape))), "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace dynmo::schedule
