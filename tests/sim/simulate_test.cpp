// SPDX-License-Identifier: Apache-2.0
#include "dynmo/sim/simulate.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "dynmo/schedule/check.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/text.h"
#include "tests/sim/longest_path.h"
#include "tests/sim/problems.h"

namespace dynmo::sim {
namespace {

using cost::Cluster;
using schedule::Action;
using schedule::ActionKind;
using schedule::PipelineShape;
using schedule::Schedule;
using schedule::ScheduleKind;
using schedule::testing::even_shape;
using schedule::testing::pick;
using testing::cluster_of;
using testing::equal_costs;
using testing::LongestPath;
using testing::lowered;
using testing::Problem;
using testing::random_problem;

TEST(Simulator, MatchesTheClosedFormsOfEqualStages) {
  constexpr std::int64_t kForward = 1'000'003;
  constexpr std::int64_t kInput = 1'100'017;
  constexpr std::int64_t kWeight = 900'001;
  for (const ScheduleKind kind : {ScheduleKind::kGpipe, ScheduleKind::k1F1B}) {
    for (int ranks = 1; ranks <= 16; ++ranks) {
      for (const int micro_batches : {1, ranks, 2 * ranks, 4 * ranks}) {
        SCOPED_TRACE(fmt::format("{}, P {}, M {}", name(kind), ranks, micro_batches));
        const auto result =
            simulate(lowered(kind, even_shape(ranks, micro_batches)),
                     equal_costs(ranks, kForward, kInput, kWeight), cluster_of(ranks));
        ASSERT_TRUE(result) << result.error().message;
        const double work = kForward + kInput + kWeight;
        const double slots = micro_batches + ranks - 1;
        const double step = static_cast<double>(result->step_time.count());
        EXPECT_NEAR(step / (slots * work), 1, 1e-9);
        EXPECT_NEAR(result->bubble, (ranks - 1) / slots, 1e-9);
        for (int r = 0; r < ranks; ++r) {
          const int stashes =
              kind == ScheduleKind::kGpipe ? micro_batches : std::min(micro_batches, ranks - r);
          const RankUsage& usage = result->ranks[static_cast<std::size_t>(r)];
          EXPECT_EQ(usage.peak_activation.value, stashes) << "rank " << r;
          EXPECT_EQ(usage.busy.count(), micro_batches * (kForward + kInput + kWeight));
        }
      }
    }
  }
}

void expect_like_longest_path(std::uint64_t key, std::uint64_t cases, bool crowded) {
  for (std::uint64_t seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE(fmt::format("key {}, seed {}", key, seed));
    Rng rng(mix_key({key, seed}));
    const Problem problem = random_problem(rng, crowded);
    const auto result =
        simulate(problem.schedule, problem.costs, problem.cluster, {.timeline = true});
    ASSERT_TRUE(result) << result.error().message;
    LongestPath oracle(problem.schedule, problem.costs, problem.cluster);
    ASSERT_EQ(result->step_time.count(), oracle.step_time()) << to_grid(problem.schedule);
    for (std::size_t r = 0; r < problem.schedule.ranks.size(); ++r) {
      const RankUsage& usage = result->ranks[r];
      ASSERT_EQ(usage.peak_activation.value, oracle.peak_stash(r));
      ASSERT_EQ(usage.busy + usage.idle, result->step_time);
      std::size_t spans = 0;
      for (std::size_t i = 0; i < problem.schedule.ranks[r].size(); ++i) {
        for (const schedule::TimedAction& span : result->timeline.ranks[r]) {
          if (span.action != problem.schedule.ranks[r][i]) continue;
          ++spans;
          if (is_compute(span.action.kind)) {
            ASSERT_EQ(span.end.count(), oracle.end(r, i));
          }
        }
      }
      ASSERT_EQ(spans, problem.schedule.ranks[r].size()) << "one span an action";
    }
  }
}

TEST(Simulator, MatchesTheLongestPathToTheNanosecond) { expect_like_longest_path(31, 1000, false); }

TEST(Simulator, MatchesTheLongestPathWithSeveralStagesARankAndSplitBackward) {
  expect_like_longest_path(32, 1000, true);
}

TEST(Simulator, CompletesFiveThousandUnevenPipelines) {
  for (std::uint64_t seed = 0; seed < 5000; ++seed) {
    Rng rng(mix_key({33, seed}));
    const Problem problem = random_problem(rng, false);
    ASSERT_TRUE(check(problem.schedule)) << "seed " << seed;
    const auto result = simulate(problem.schedule, problem.costs, problem.cluster);
    ASSERT_TRUE(result) << "seed " << seed << ": " << result.error().message;
    Nanoseconds busiest{0};
    for (const RankUsage& usage : result->ranks) busiest = std::max(busiest, usage.busy);
    ASSERT_GE(result->step_time, busiest) << "seed " << seed;
    ASSERT_TRUE(result->bubble >= 0 && result->bubble <= 1) << "seed " << seed;
    ASSERT_TRUE(result->timeline.ranks.empty());
  }
}

TEST(Simulator, ACheckedScheduleReplaysLikeOneThatIsNot) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({35, seed}));
    const Problem problem = random_problem(rng, true);
    const auto checked = CheckedSchedule::make(problem.schedule);
    ASSERT_TRUE(checked) << "seed " << seed;
    ASSERT_EQ(checked->schedule(), problem.schedule);
    const auto once = simulate(*checked, problem.costs, problem.cluster);
    const auto again = simulate(*checked, problem.costs, problem.cluster);
    const auto plain = simulate(problem.schedule, problem.costs, problem.cluster);
    ASSERT_EQ(once->step_time, plain->step_time) << "seed " << seed;
    ASSERT_EQ(again->step_time, plain->step_time) << "seed " << seed;
    ASSERT_EQ(once->bubble, plain->bubble) << "seed " << seed;
  }
}

// The memory is measured where this test runs alone, as ctest does.
TEST(Simulator, ReplaysFourThousandRanksInTwoGibibytes) {
  PipelineShape shape{.ranks = 4096, .micro_batches = 64, .stages = {}};
  for (const Rank rank : schedule::wave_placement(shape.ranks, 2)) shape.stages.push_back({rank});
  const Schedule schedule = lowered(ScheduleKind::kZbV, shape);
  std::vector<StageCost> costs = equal_costs(8192, 100, 100, 100);
  Cluster cluster = cost::equal_nodes(512, 8);
  cluster.between_nodes.latency_s = 10e-9;
  for (StageCost& cost : costs) cost.boundary = Bytes{10};
  cluster.nic_bandwidth_bytes_per_s = 1e9;
  const auto result = simulate(schedule, costs, cluster);
  ASSERT_TRUE(result) << result.error().message;
  for (const RankUsage& rank : result->ranks) {
    ASSERT_EQ(rank.busy.count(), 2 * 64 * 300);
    ASSERT_EQ(rank.busy + rank.split.fill_drain + rank.split.communication, result->step_time);
  }
  // The first micro-batch passes all stages and comes back, twice over 511 borders of nodes each
  // way.
  EXPECT_GE(result->step_time.count(), 8192 * 2 * 100 + 4 * 511 * 20);
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  EXPECT_LT(usage.ru_maxrss, 2 << 20) << "KiB";
}

TEST(Simulator, RoundsBackwardAsInputGradientPlusWeightGradient) {
  Cluster cluster = cluster_of(1);
  cluster.ranks[0].speed = 2;
  const PipelineShape shape = even_shape(1, 1);
  const auto whole =
      simulate(lowered(ScheduleKind::k1F1B, shape), equal_costs(1, 4, 3, 5), cluster);
  EXPECT_EQ(whole->step_time.count(), 2 + 2 + 3);
  const Schedule split{.shape = shape,
                       .ranks = {{*schedule::parse_action("0F0"), *schedule::parse_action("0I0"),
                                  *schedule::parse_action("0W0")}},
                       .lowered = true};
  EXPECT_EQ(simulate(split, equal_costs(1, 4, 3, 5), cluster)->step_time, whole->step_time);
}

TEST(Simulator, WaitsForSendsBeforeTheUpdate) {
  // Frozen stage 0 has nothing to do after its send, which takes 100 ns; stage 1 updates for 50.
  const Schedule schedule = lowered(ScheduleKind::k1F1B, even_shape(2, 1, 1));
  std::vector<StageCost> costs = equal_costs(2, 10, 0, 0);
  costs[0].update = costs[1].update = Nanoseconds{50};
  costs[0].boundary = Bytes{100};
  Cluster cluster = cluster_of(2);
  cluster.inside_node.bandwidth_bytes_per_s = 1e9;
  const auto result = simulate(schedule, costs, cluster, {.timeline = true});
  ASSERT_TRUE(result);
  EXPECT_EQ(result->step_time.count(), 10 + 100 + 10 + 50);
  EXPECT_EQ(result->ranks[0].busy.count(), 10) << "a frozen stage has nothing to update";
  EXPECT_EQ(result->ranks[1].busy.count(), 60);
  ASSERT_EQ(result->timeline.ranks[1].size(), 3U);
  const schedule::TimedAction& message = result->timeline.ranks[1][0];
  EXPECT_EQ(to_string(message.action), "1RECV_F0");
  EXPECT_EQ(message.start.count(), 10);
  EXPECT_EQ(message.end.count(), 110);
}

TEST(Simulator, CountsPendingSendsOfARankThatIsDone) {
  // The gradient of the first micro-batch's input takes 1000 ns; after it rank 1 has nothing left.
  std::vector<StageCost> costs = equal_costs(2, 10, 10, 10);
  costs[1].update = Nanoseconds{7};
  Cluster cluster = cluster_of(2);
  cluster.inside_node.latency_s = 1e-6;
  const auto result = simulate(lowered(ScheduleKind::k1F1B, even_shape(2, 1)), costs, cluster);
  ASSERT_TRUE(result);
  // F0 10, message 1000, F1 10, B1 20, message 1000; then B0 takes 20, and the updates wait for it.
  EXPECT_EQ(result->step_time.count(), 10 + 1000 + 30 + 1000 + 20 + 7);
}

TEST(Simulator, StartsATransferWhenTheReceiveIsPosted) {
  // Rank 1 posts the receive of micro-batch 1 only when its F0 starts, at 1010 ns; the send waited
  // since 20. So the message arrives after F0, though rank 1 was idle all the time before.
  std::vector<StageCost> costs = equal_costs(2, 10, 0, 0);
  Cluster cluster = cluster_of(2);
  cluster.inside_node.latency_s = 1e-6;
  const Schedule forward = lower(*make_forward_schedule(even_shape(2, 3)));
  const auto result = simulate(forward, costs, cluster, {.timeline = true});
  ASSERT_TRUE(result);
  std::map<std::string, std::int64_t> starts;
  for (const auto& span : result->timeline.ranks[1]) {
    starts[to_string(span.action)] = span.start.count();
  }
  EXPECT_EQ(starts["1RECV_F0"], 10);
  EXPECT_EQ(starts["1RECV_F1"], 20) << "posted before F0, one compute action ahead";
  EXPECT_EQ(starts["1RECV_F2"], 1020) << "posted after F0";
  EXPECT_EQ(starts["1F2"], 2020);
}

// All receives posted at the start of the step: no rule of lowering can be faster.
Schedule with_all_receives_first(Schedule schedule) {
  for (std::vector<Action>& list : schedule.ranks) {
    std::stable_partition(list.begin(), list.end(), [](const Action& a) {
      return a.kind == ActionKind::kReceiveActivation || a.kind == ActionKind::kReceiveGradient;
    });
  }
  return schedule;
}

// Latency 20 % of the mean forward. Posting one compute action ahead is enough but for messages
// that take longer than that action.
TEST(Lowering, CostsLittleAgainstReceivesPostedAtTheStart) {
  double worst = 1;
  double sum = 0;
  constexpr int kCases = 300;
  for (std::uint64_t seed = 0; seed < kCases; ++seed) {
    Rng rng(mix_key({34, seed}));
    const int ranks = pick(rng, 2, 8);
    const auto kind = pick(rng, 0, 1) == 0 ? ScheduleKind::kGpipe : ScheduleKind::k1F1B;
    const Schedule schedule = lowered(kind, even_shape(ranks, pick(rng, 1, 4) * ranks));
    std::vector<StageCost> costs = equal_costs(ranks, 0, 0, 0);
    for (StageCost& cost : costs) {
      cost.forward = Nanoseconds{pick(rng, 0, 20'000)};
      cost.input_gradient = Nanoseconds{pick(rng, 0, 20'000)};
      cost.weight_gradient = Nanoseconds{pick(rng, 0, 20'000)};
    }
    Cluster cluster = cluster_of(ranks);
    cluster.inside_node.latency_s = 2e-6;
    const auto time = [&](const Schedule& candidate) {
      return to_seconds(simulate(candidate, costs, cluster)->step_time);
    };
    const double ratio = time(schedule) / time(with_all_receives_first(schedule));
    ASSERT_GE(ratio, 1) << "seed " << seed;
    worst = std::max(worst, ratio);
    sum += ratio;
  }
  EXPECT_LT(worst, 1.03);
  EXPECT_LT(sum / kCases, 1.0002);
}

TEST(Simulator, LeavesIdleRanksIdle) {
  const PipelineShape shape{
      .ranks = 3, .micro_batches = 2, .stages = {{.rank = Rank{0}}, {.rank = Rank{2}}}};
  const auto result =
      simulate(lowered(ScheduleKind::k1F1B, shape), equal_costs(2, 10, 10, 0), cluster_of(3));
  ASSERT_TRUE(result);
  EXPECT_EQ(result->step_time.count(), 60);
  EXPECT_EQ(result->ranks[1].busy.count(), 0);
  EXPECT_EQ(result->ranks[1].idle, result->step_time);
  EXPECT_NEAR(result->bubble, 1 - 80.0 / 180, 1e-12);
}

TEST(Simulator, HasNoBubbleInAStepOfNoTime) {
  const auto result = simulate(lowered(ScheduleKind::k1F1B, even_shape(2, 2)),
                               equal_costs(2, 0, 0, 0), cluster_of(2));
  EXPECT_EQ(result->step_time.count(), 0);
  EXPECT_EQ(result->bubble, 0);
}

TEST(Simulator, AddsStateToThePeakOfStashes) {
  std::vector<StageCost> costs = equal_costs(2, 1, 1, 1);
  costs[0].state = Bytes{100};
  const auto result =
      simulate(lowered(ScheduleKind::kGpipe, even_shape(2, 3, 1)), costs, cluster_of(2));
  EXPECT_EQ(result->ranks[0].peak_memory, Bytes{100}) << "a frozen stage stashes nothing";
  EXPECT_EQ(result->ranks[1].peak_memory, Bytes{3});
}

TEST(Simulator, NamesTheActionsOfAScheduleThatCannotComplete) {
  Schedule stuck = lowered(ScheduleKind::k1F1B, even_shape(2, 2));
  // Rank 1 wants to see both micro-batches before it sends the first gradient back, rank 0 needs
  // that gradient before its second forward.
  stuck.ranks[0].clear();
  stuck.ranks[1].clear();
  for (const char* text :
       {"0F0", "0SEND_F0", "0RECV_B0", "0B0", "0F1", "0SEND_F1", "0RECV_B1", "0B1"}) {
    stuck.ranks[0].push_back(*schedule::parse_action(text));
  }
  for (const char* text :
       {"1RECV_F0", "1RECV_F1", "1F0", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"}) {
    stuck.ranks[1].push_back(*schedule::parse_action(text));
  }
  const auto result = simulate(stuck, equal_costs(2, 1, 1, 1), cluster_of(2));
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(result.error().message, check(stuck).error().message);
  const auto checked = CheckedSchedule::make(stuck);
  ASSERT_TRUE(checked);
  for (const bool queues : {false, true}) {
    Cluster cluster = cluster_of(2);
    if (queues) {
      cluster.ranks[1].node = 1;
      cluster.nic_bandwidth_bytes_per_s = 1e9;
    }
    const auto replayed = simulate(*checked, equal_costs(2, 1, 1, 1), cluster);
    ASSERT_FALSE(replayed);
    EXPECT_EQ(replayed.error().message, check(stuck).error().message);
  }
  EXPECT_NE(result.error().message.find("0B0 on rank 0 waits for 1SEND_B0"), std::string::npos);
}

TEST(Simulator, RefusesAScheduleThatIsNotLowered) {
  EXPECT_FALSE(simulate(*make_schedule(ScheduleKind::k1F1B, even_shape(2, 2)),
                        equal_costs(2, 1, 1, 1), cluster_of(2)));
}

std::string refusal(const std::vector<StageCost>& costs, const Cluster& cluster) {
  const auto result = simulate(lowered(ScheduleKind::k1F1B, even_shape(2, 4)), costs, cluster);
  if (result) return "accepted";
  EXPECT_EQ(result.error().code, ErrorCode::kBadInput);
  EXPECT_EQ(result.error().message.find('\n'), std::string::npos);
  return result.error().message;
}

TEST(Simulator, RefusesCostsThatDoNotFitTheSchedule) {
  EXPECT_EQ(refusal(equal_costs(3, 1, 1, 1), cluster_of(2)),
            "costs of 3 stages for a schedule of 2; want as many");
  EXPECT_EQ(refusal(equal_costs(2, 1, 1, 1), cluster_of(3)),
            "a cluster of 3 ranks for a schedule of 2; want as many");
}

TEST(Simulator, RefusesCostsLinksAndSpeedsThatAreNone) {
  std::vector<StageCost> costs = equal_costs(2, 1, 1, 1);
  costs[1].weight_gradient = Nanoseconds{-1};
  EXPECT_EQ(refusal(costs, cluster_of(2)), "stage 1 has weight_gradient -1; want 0 or more");
  costs = equal_costs(2, 1, 1, 1);
  costs[0].boundary = Bytes{-5};
  EXPECT_EQ(refusal(costs, cluster_of(2)), "stage 0 has boundary -5; want 0 or more");

  costs = equal_costs(2, 1, 1, 1);
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  for (const double speed : {0.0, -1.0, kNan, kInfinite}) {
    Cluster cluster = cluster_of(2);
    cluster.ranks[1].speed = speed;
    EXPECT_NE(refusal(costs, cluster).find("rank 1 has speed"), std::string::npos) << speed;
  }
  for (const double latency : {-1.0, kNan, kInfinite}) {
    Cluster cluster = cluster_of(2);
    cluster.between_nodes.latency_s = latency;
    EXPECT_NE(refusal(costs, cluster).find("the link between nodes"), std::string::npos) << latency;
  }
  for (const double bandwidth : {-1.0, 0.0, kNan}) {
    Cluster cluster = cluster_of(2);
    cluster.inside_node.bandwidth_bytes_per_s = bandwidth;
    EXPECT_NE(refusal(costs, cluster).find("the link inside a node"), std::string::npos);
  }
}

TEST(Simulator, RefusesSumsThatDoNotFit64Bits) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 61;
  EXPECT_NE(refusal(equal_costs(2, kHuge, 0, 0), cluster_of(2)).find("2^62"), std::string::npos);
  std::vector<StageCost> costs = equal_costs(2, 1, 1, 1);
  costs[0].state = costs[1].state = Bytes{std::numeric_limits<std::int64_t>::max()};
  EXPECT_NE(refusal(costs, cluster_of(2)).find("2^62"), std::string::npos);
  costs = equal_costs(2, 1, 1, 1);
  costs[1].activation = Bytes{kHuge};
  EXPECT_NE(refusal(costs, cluster_of(2)).find("2^62"), std::string::npos);
  costs = equal_costs(2, 1, 1, 1);
  Cluster slow = cluster_of(2);
  slow.ranks[0].speed = 1e-300;
  EXPECT_NE(refusal(costs, slow).find("2^62"), std::string::npos);
  Cluster far = cluster_of(2);
  far.inside_node.latency_s = 1e300;
  EXPECT_NE(refusal(costs, far).find("2^62"), std::string::npos);
  // Just below the limit all is exact: (4 + 2 - 1) slots of 2^58.
  const auto result = simulate(lowered(ScheduleKind::kGpipe, even_shape(2, 4)),
                               equal_costs(2, (kHuge >> 3) + 1, 0, 0), cluster_of(2));
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_EQ(result->step_time.count(), 5 * ((kHuge >> 3) + 1));
}

}  // namespace
}  // namespace dynmo::sim
