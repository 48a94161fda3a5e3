// SPDX-License-Identifier: Apache-2.0
// The step times and stashes of docs/schedules.md, against the replay, where all stages are equal.
#include <gtest/gtest.h>

#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/simulate.h"
#include "tests/schedule/random_pipelines.h"

namespace dynmo::sim {
namespace {

using schedule::ScheduleKind;

constexpr std::int64_t kUnit = 1'000'003;  // ns of F, I and W of a stage

constexpr StageCost kStage{.forward = Nanoseconds{kUnit},
                           .input_gradient = Nanoseconds{kUnit},
                           .weight_gradient = Nanoseconds{kUnit},
                           .update = {},
                           .state = {},
                           .activation = Bytes{1},
                           .boundary = {}};

cost::Cluster ranks_of(int ranks) {
  return {.ranks = std::vector<cost::ClusterRank>(static_cast<std::size_t>(ranks)),
          .inside_node = {},
          .between_nodes = {}};
}

// All stages cost kStage unless `costs` says otherwise.
SimResult replay(ScheduleKind kind, const std::vector<Rank>& placement, int ranks,
                 int micro_batches, schedule::ScheduleOptions options = {},
                 std::vector<StageCost> costs = {}) {
  schedule::PipelineShape shape{.ranks = ranks, .micro_batches = micro_batches, .stages = {}};
  for (const Rank rank : placement) shape.stages.push_back({.rank = rank});
  if (costs.empty()) costs.assign(placement.size(), kStage);
  return *simulate(lower(*make_schedule(kind, shape, options)), costs, ranks_of(ranks));
}

// Step time in units of F of a stage.
void expect_step(const SimResult& result, double units) {
  EXPECT_NEAR(static_cast<double>(result.step_time.count()) / (units * kUnit), 1, 1e-9);
}

std::vector<std::int64_t> stashes(const SimResult& result) {
  std::vector<std::int64_t> peaks;
  for (const RankUsage& rank : result.ranks) peaks.push_back(rank.peak_activation.value);
  return peaks;
}

template <typename Body>
void for_each_size(Body body) {
  for (int ranks = 1; ranks <= 16; ++ranks) {
    for (const int micro_batches : {ranks, 2 * ranks, 4 * ranks}) {
      SCOPED_TRACE(fmt::format("P {}, M {}", ranks, micro_batches));
      body(ranks, micro_batches);
    }
  }
}

// Time of actions outside the layers counts as if the layers took it, but it is nobody's work.
TEST(ClosedForms, HoldWithTimeBesideTheLayers) {
  constexpr Nanoseconds kAction{1234};
  for (const ScheduleKind kind : {ScheduleKind::kGpipe, ScheduleKind::k1F1B, ScheduleKind::kZbH1}) {
    for_each_size([&](int ranks, int micro_batches) {
      schedule::PipelineShape shape{.ranks = ranks, .micro_batches = micro_batches, .stages = {}};
      for (int r = 0; r < ranks; ++r) shape.stages.push_back({.rank = Rank(r)});
      const schedule::Schedule lowered = lower(*make_schedule(kind, shape));
      const std::vector<StageCost> costs(static_cast<std::size_t>(ranks), kStage);
      cost::Cluster cluster = ranks_of(ranks);
      cluster.action_s = to_seconds(kAction);
      const SimResult result = *simulate(lowered, costs, cluster);
      StageCost longer = kStage;
      longer.forward += kAction;
      longer.input_gradient += kAction;
      if (kind == ScheduleKind::kZbH1) longer.weight_gradient += kAction;
      const std::vector<StageCost> stages(static_cast<std::size_t>(ranks), longer);
      EXPECT_EQ(result.step_time, simulate(lowered, stages, ranks_of(ranks))->step_time);
      for (const RankUsage& rank : result.ranks) {
        EXPECT_EQ(rank.busy.count(), 3 * kUnit * micro_batches);
        EXPECT_EQ((rank.split.fill_drain + rank.split.imbalance + rank.split.communication +
                   rank.split.straggler),
                  rank.idle);
        EXPECT_EQ(rank.split.straggler.count(), 0);
      }
    });
  }
}

// T = M (F + B) + (P - 1) (F + B) / v, here with F + B = 3 v units.
TEST(ClosedForms, HoldForInterleaved) {
  for (const int laps : {1, 2, 4}) {
    for_each_size([&](int ranks, int micro_batches) {
      SCOPED_TRACE(fmt::format("v {}", laps));
      for (const int groups : {1, 2}) {
        const int group = micro_batches / groups;
        if (group < ranks) continue;
        const SimResult result =
            replay(ScheduleKind::kInterleaved, schedule::loop_placement(ranks, laps), ranks,
                   micro_batches, {.group_size = group});
        expect_step(result, 3.0 * (micro_batches * laps + ranks - 1));
        std::vector<std::int64_t> most;
        for (int r = 0; r < ranks; ++r) {
          const int ahead = laps == 1 ? ranks - 1 - r : 2 * (ranks - 1 - r) + (laps - 1) * group;
          most.push_back(std::min(micro_batches * laps, ahead + 1));
        }
        EXPECT_EQ(stashes(result), most);
      }
    });
  }
}

// T = M (F + I + W) + (P - 1) (F + I - W).
TEST(ClosedForms, HoldForZbH1) {
  for_each_size([](int ranks, int micro_batches) {
    const SimResult result =
        replay(ScheduleKind::kZbH1, schedule::loop_placement(ranks, 1), ranks, micro_batches);
    expect_step(result, 3.0 * micro_batches + ranks - 1);
    EXPECT_EQ(stashes(result), std::vector<std::int64_t>(static_cast<std::size_t>(ranks), ranks));
  });
}

// T = M (F + I + W) + (P - 1) F / 2 of a rank, whose F is 2 units; from M = 2 P - 1 on.
TEST(ClosedForms, HoldForZbV) {
  for (int ranks = 1; ranks <= 16; ++ranks) {
    for (const int micro_batches : {2 * ranks - 1, 2 * ranks, 4 * ranks}) {
      SCOPED_TRACE(fmt::format("P {}, M {}", ranks, micro_batches));
      const SimResult result =
          replay(ScheduleKind::kZbV, schedule::wave_placement(ranks, 2), ranks, micro_batches);
      expect_step(result, 6.0 * micro_batches + ranks - 1);
      EXPECT_EQ(stashes(result), std::vector<std::int64_t>(static_cast<std::size_t>(ranks),
                                                           std::min(2 * ranks, 2 * micro_batches)));
    }
  }
}

// Below that it takes longer and stashes less: with M = P, P - 1 units longer. In between there is
// no form as simple.
TEST(ClosedForms, HoldForZbVWithAsManyMicroBatchesAsRanks) {
  for (int ranks = 1; ranks <= 16; ++ranks) {
    SCOPED_TRACE(fmt::format("P {}", ranks));
    const SimResult result =
        replay(ScheduleKind::kZbV, schedule::wave_placement(ranks, 2), ranks, ranks);
    expect_step(result, 6.0 * ranks + 2 * (ranks - 1));
    std::vector<std::int64_t> most;
    for (int r = 0; r < ranks; ++r) most.push_back(ranks + 1 + r);
    EXPECT_EQ(stashes(result), most);
  }
}

// The middle of the V in one stage, as plans have it, changes nothing.
TEST(ClosedForms, HoldForZbVWithItsMiddleInOneStage) {
  for (int ranks = 2; ranks <= 16; ++ranks) {
    for (const int micro_batches : {2 * ranks - 1, 2 * ranks, 4 * ranks}) {
      SCOPED_TRACE(fmt::format("P {}, M {}", ranks, micro_batches));
      std::vector<Rank> placement = schedule::wave_placement(ranks, 2);
      placement.erase(placement.begin() + ranks);
      std::vector<StageCost> costs(placement.size(), kStage);
      StageCost& middle = costs[static_cast<std::size_t>(ranks - 1)];
      for (Nanoseconds* time : {&middle.forward, &middle.input_gradient, &middle.weight_gradient}) {
        *time *= 2;
      }
      middle.activation = Bytes{2};
      const SimResult result =
          replay(ScheduleKind::kZbV, placement, ranks, micro_batches, {}, costs);
      expect_step(result, 6.0 * micro_batches + ranks - 1);
      EXPECT_EQ(stashes(result),
                std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 2 * ranks));
    }
  }
}

TEST(Templates, RunToTheEndOnTenThousandRandomPipelines) {
  using schedule::testing::pick;
  for (std::uint64_t seed = 0; seed < 10000; ++seed) {
    Rng rng(mix_key({41, seed}));
    const ScheduleKind kind =
        schedule::testing::kTemplates[seed % schedule::testing::kTemplates.size()];
    const auto [shape, options] = schedule::testing::random_pipeline(rng, kind);
    std::vector<StageCost> costs(shape.stages.size(), kStage);
    for (StageCost& cost : costs) {
      for (Nanoseconds* time : {&cost.forward, &cost.input_gradient, &cost.weight_gradient}) {
        *time = Nanoseconds{pick(rng, 0, 3) == 0 ? 0 : pick(rng, 1, 1000)};
      }
    }
    cost::Cluster cluster = ranks_of(shape.ranks);
    cluster.inside_node.latency_s = pick(rng, 0, 200) * 1e-9;
    const auto made = make_schedule(kind, shape, options);
    ASSERT_TRUE(made) << "seed " << seed << ": " << made.error().message;
    const auto result = simulate(lower(*made), costs, cluster);
    ASSERT_TRUE(result) << "seed " << seed << ": " << result.error().message;
    std::vector<Nanoseconds> work(static_cast<std::size_t>(shape.ranks));
    for (std::size_t s = 0; s < costs.size(); ++s) {
      const Nanoseconds gradients = costs[s].input_gradient + costs[s].weight_gradient;
      work[shape.stages[s].rank.index()] +=
          shape.micro_batches *
          (costs[s].forward + (shape.stages[s].frozen ? Nanoseconds{0} : gradients));
    }
    for (std::size_t r = 0; r < work.size(); ++r) {
      EXPECT_EQ(result->ranks[r].busy, work[r]) << "seed " << seed << ", rank " << r;
      EXPECT_GE(result->step_time, work[r]) << "seed " << seed << ", rank " << r;
    }
  }
}

}  // namespace
}  // namespace dynmo::sim
