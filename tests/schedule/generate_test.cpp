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
using testing::random_shape;

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
  for (const ScheduleKind kind : {ScheduleKind::kGpipe, ScheduleKind::k1F1B}) {
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

TEST(Generators, MakeValidSchedulesOfFiveThousandUnevenPipelines) {
  for (std::uint64_t seed = 0; seed < 5000; ++seed) {
    Rng rng(mix_key({11, seed}));
    const PipelineShape shape = random_shape(rng);
    const auto kind = seed % 2 == 0 ? ScheduleKind::kGpipe : ScheduleKind::k1F1B;
    const Expected<ScheduleFacts> facts = check(lower(*make_schedule(kind, shape)));
    ASSERT_TRUE(facts) << "seed " << seed << ": " << facts.error().message;
    const int stages = static_cast<int>(shape.stages.size());
    for (int s = 0; s < stages; ++s) {
      const auto index = static_cast<std::size_t>(s);
      const int bound = kind == ScheduleKind::kGpipe ? shape.micro_batches
                                                     : std::min(shape.micro_batches, stages - s);
      EXPECT_EQ(facts->in_flight[index], shape.stages[index].frozen ? 0 : bound) << "seed " << seed;
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
