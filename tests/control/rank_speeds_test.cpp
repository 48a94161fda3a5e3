// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/rank_speeds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/cost/device.h"
#include "dynmo/cost/transformer.h"
#include "dynmo/dynamism/registry.h"
#include "dynmo/plan/plan.h"

namespace dynmo::control {
namespace {

const plan::Plan kSpeedPlan = plan::make_plan({2, 3, 3}, schedule::ScheduleKind::k1F1B);

std::vector<cost::LayerSample> timed(int layers, const std::function<double(int)>& time_of) {
  std::vector<cost::LayerSample> result;
  for (int layer = 0; layer < layers; ++layer) {
    const double seconds = time_of(layer);
    result.push_back({.time = {seconds, seconds, seconds}, .update_s = seconds, .stash_bytes = {}});
  }
  return result;
}

struct FoundSpeed {
  int step;
  SpeedChange change;
};

// Watches 8 layers with the given times by (step, layer).
struct Watch {
  void run(int until, const std::function<double(int, int)>& time_of,
           const plan::Plan& plan = kSpeedPlan) {
    for (; step < until; ++step) {
      const auto layers = timed(8, [&](int layer) { return time_of(step, layer); });
      for (const SpeedChange& change : speeds.add(layers, plan::owners(plan))) {
        found.push_back({step, change});
      }
    }
  }

  RankSpeeds speeds;
  std::vector<FoundSpeed> found;
  int step = 0;
};

std::vector<FoundSpeed> watch_speeds(int steps, const std::function<double(int, int)>& time_of) {
  Watch watch;
  watch.run(steps, time_of);
  return watch.found;
}

bool is_slowed(int layer) { return layer >= 2 && layer < 5; }

TEST(RankSpeeds, NamesTheRankItsFactorAndTheSteps) {
  Watch watch;
  const auto time_of = [](int step, int layer) {
    return (1 + layer) * (step >= 50 && step < 90 && is_slowed(layer) ? 2 : 1.0);
  };
  watch.run(80, time_of);
  ASSERT_EQ(watch.found.size(), 1U);
  EXPECT_EQ(watch.found[0].step, 53);
  EXPECT_EQ(watch.found[0].change.rank, Rank(1));
  EXPECT_NEAR(watch.found[0].change.factor, 2, 1e-9);
  EXPECT_EQ(watch.found[0].change.steps, 4);
  const cost::Cluster slowed = watch.speeds.slowed(cost::equal_ranks(3));
  EXPECT_NEAR(slowed.ranks[1].speed, 0.5, 1e-9);
  EXPECT_EQ(slowed.ranks[2].speed, 1);
  const auto full =
      watch.speeds.at_full_speed(timed(8, [](int) { return 1.0; }), plan::owners(kSpeedPlan));
  EXPECT_EQ(full[1], timed(1, [](int) { return 1.0; })[0]);
  EXPECT_NEAR(full[2].time.forward_s, 0.5, 1e-9);
  watch.run(120, time_of);
  ASSERT_EQ(watch.found.size(), 2U);
  EXPECT_EQ(watch.found[1].step, 93);
  EXPECT_EQ(watch.found[1].change.factor, 1);
  EXPECT_EQ(watch.speeds.slowed(cost::equal_ranks(3)), cost::equal_ranks(3));
}

TEST(RankSpeeds, AreThoseOfNoRankWithALayerOfMoreWork) {
  EXPECT_TRUE(watch_speeds(200, [](int step, int layer) {
                return step >= 50 && (layer == 2 || layer == 3) ? 5.0 : 1.0;
              }).empty());
  EXPECT_TRUE(watch_speeds(200, [](int step, int layer) {
                return step >= 50 && is_slowed(layer) ? 1.0 + layer : 1.0;
              }).empty());
}

TEST(RankSpeeds, AreRelativeToTheOtherRanks) {
  EXPECT_TRUE(watch_speeds(200, [](int step, int) { return step >= 50 ? 4.0 : 1.0; }).empty());
  EXPECT_TRUE(watch_speeds(200, [](int step, int layer) {
                return step >= 50 && layer < 5 ? 0.3 : 1.0;
              }).empty());
  const auto found = watch_speeds(200, [](int step, int layer) {
    return step < 50 ? 1.0 : is_slowed(layer) ? 4.0 : 2.0;
  });
  ASSERT_EQ(found.size(), 1U);
  EXPECT_NEAR(found[0].change.factor, 2, 1e-9);
}

TEST(RankSpeeds, DoNotChangeForABurstOrByNoise) {
  EXPECT_TRUE(watch_speeds(200, [](int step, int layer) {
                return step % 7 < 3 && is_slowed(layer) ? 10.0 : 1.0;
              }).empty());
  Rng draw(1);
  EXPECT_TRUE(watch_speeds(2000, [&](int, int) { return 1 + draw.uniform(); }).empty());
}

TEST(RankSpeeds, DoNotExplainCountedOrAnnouncedWork) {
  const auto owners = plan::owners(kSpeedPlan);
  for (const bool counted : {true, false}) {
    RankSpeeds speeds;
    for (int step = 0; step < 100; ++step) {
      const auto time_of = [&](int layer) { return step >= 50 && is_slowed(layer) ? 2.0 : 1.0; };
      auto layers = timed(8, time_of);
      for (int i = 0; counted && i < 8; ++i) {
        layers[static_cast<std::size_t>(i)].work = 7 * time_of(i);
      }
      if (step == 50) speeds.restart();
      EXPECT_TRUE(speeds.add(layers, owners).empty()) << "step " << step;
    }
  }
}

// Work that grew on all layers of rank 1 alone looks as a slow rank does, until layers have left.
TEST(RankSpeeds, AreRefutedByLayersThatTakeAsLongElsewhere) {
  Watch watch;
  const auto work = [](int step, int layer) { return step >= 50 && is_slowed(layer) ? 2.0 : 1.0; };
  watch.run(60, work);
  ASSERT_EQ(watch.found.size(), 1U);
  watch.run(80, work, plan::make_plan({3, 2, 3}, schedule::ScheduleKind::k1F1B, 1));
  ASSERT_EQ(watch.found.size(), 2U);
  EXPECT_EQ(watch.found[1].step, 62);
  EXPECT_EQ(watch.found[1].change.rank, Rank(1));
  EXPECT_NEAR(watch.found[1].change.before, 2, 1e-9);
  EXPECT_EQ(watch.found[1].change.factor, 1);
  EXPECT_EQ(watch.speeds.slowed(cost::equal_ranks(3)), cost::equal_ranks(3));
}

TEST(RankSpeeds, OfARankThatWasAlwaysSlowAreLearntFromLayersThatLeave) {
  Watch watch;
  watch.run(30, [](int, int layer) { return is_slowed(layer) ? 2.0 : 1.0; });
  EXPECT_TRUE(watch.found.empty());
  watch.run(
      60, [](int, int layer) { return layer == 3 ? 2.0 : 1.0; },
      plan::make_plan({3, 1, 4}, schedule::ScheduleKind::k1F1B, 1));
  ASSERT_EQ(watch.found.size(), 1U);
  EXPECT_EQ(watch.found[0].step, 32);
  EXPECT_EQ(watch.found[0].change.rank, Rank(1));
  EXPECT_NEAR(watch.found[0].change.factor, 2, 1e-9);
}

// A slow rank may keep a single layer. It is seen to be fast again there, or by the layers that
// come back, and not taken for a rank that they were slow on.
TEST(RankSpeeds, AreFullAgainByASingleLayerOrByThoseThatComeBack) {
  const plan::Plan few = plan::make_plan({4, 1, 3}, schedule::ScheduleKind::k1F1B, 1);
  for (const bool back : {false, true}) {
    SCOPED_TRACE(back ? "layers come back" : "a single layer");
    Watch watch;
    watch.run(60, [](int step, int layer) { return step >= 30 && is_slowed(layer) ? 2.0 : 1.0; });
    ASSERT_EQ(watch.found.size(), 1U);
    watch.run(
        90, [](int, int layer) { return layer == 4 ? 2.0 : 1.0; }, few);
    ASSERT_EQ(watch.found.size(), 1U);
    watch.run(
        120, [](int, int) { return 1.0; }, back ? kSpeedPlan : few);
    ASSERT_EQ(watch.found.size(), 2U);
    EXPECT_EQ(watch.found[1].step, back ? 92 : 93);
    EXPECT_EQ(watch.found[1].change.rank, Rank(1));
    EXPECT_EQ(watch.found[1].change.factor, 1);
  }
}

TEST(RankSpeeds, FollowRanksThatGetOtherNumbers) {
  Watch watch;
  watch.run(60, [](int step, int layer) { return step >= 30 && is_slowed(layer) ? 2.0 : 1.0; });
  watch.speeds.ranks_changed({Rank(1), std::nullopt, Rank(2)});
  EXPECT_NEAR(watch.speeds.slowed(cost::equal_ranks(3)).ranks[0].speed, 0.5, 1e-9);
  watch.speeds.ranks_changed({Rank(1), Rank(2)});
  EXPECT_EQ(watch.speeds.slowed(cost::equal_ranks(2)), cost::equal_ranks(2));
}

// Layers that leave a rank with the rank itself say nothing of a rank that is there, nor of one
// that comes later and gets a number like it.
TEST(RankSpeeds, AreNotLearntForRanksThatHaveLeft) {
  const auto always_slow = [](int, int layer) { return is_slowed(layer) ? 2.0 : 1.0; };
  const auto alike = [](int, int) { return 1.0; };
  for (const bool twice : {false, true}) {
    Watch watch;
    watch.run(30, always_slow);
    watch.speeds.ranks_changed({Rank(0), Rank(2)});
    if (twice) watch.speeds.ranks_changed({Rank(0)});
    watch.run(40, alike,
              twice ? plan::make_plan({8}, schedule::ScheduleKind::k1F1B, 1)
                    : plan::make_plan({4, 4}, schedule::ScheduleKind::k1F1B, 1));
    EXPECT_TRUE(watch.found.empty()) << "rank " << watch.found.front().change.rank.value;
    watch.speeds.ranks_changed({Rank(0), std::nullopt, std::nullopt});
    EXPECT_EQ(watch.speeds.slowed(cost::equal_ranks(3)), cost::equal_ranks(3));
  }
}

// Small models of every source, 8 ranks, noise of layers and ranks, and bursts of one rank.
class NoFalseAlarm : public ::testing::TestWithParam<std::string> {};

TEST_P(NoFalseAlarm, InManyStepsWithBursts) {
  constexpr std::int64_t kSteps = 2'000;
  const bool experts = GetParam() == "moe";
  cost::TransformerShape shape =
      cost::transformer_shape({.hidden = 1024, .blocks = 12, .sequence = 512},
                              experts ? cost::Architecture::kMixtral : cost::Architecture::kGpt);
  if (experts) {
    shape.experts = 8;
    shape.experts_per_token = 2;
  }
  const auto load =
      dynamism::make_load_model(GetParam(), {.inputs = {.shape = shape,
                                                        .device = cost::find_device("h100").value(),
                                                        .seed = 1,
                                                        .steps = kSteps,
                                                        .micro_batches = 8},
                                             .sources = {}});
  ASSERT_TRUE(load) << load.error().message;
  const int layers = (*load)->at(0).size();
  std::vector<int> cut(8, layers / 8);
  for (int i = 0; i < layers % 8; ++i) ++cut[static_cast<std::size_t>(i)];
  const auto owners = plan::owners(plan::make_plan(cut, schedule::ScheduleKind::k1F1B));
  Rng draw(5);
  RankSpeeds speeds;
  Rank burst(0);
  std::int64_t burst_until = 0;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const cost::ModelCost costs = (*load)->at(step);
    const auto announced = (*load)->announced_at(step);
    if (announced != cost::Announced::kNothing && announced != cost::Announced::kKnown) {
      speeds.restart();
    }
    if (step > burst_until + 1 && draw.uniform() < 0.1) {
      burst = Rank(static_cast<std::int32_t>(draw.below(8)));
      burst_until = step + 2;
    }
    std::vector<double> of_rank;
    for (int r = 0; r < 8; ++r) of_rank.push_back(std::max(0.5, 1 + 0.02 * draw.normal()));
    std::vector<cost::LayerSample> seen;
    for (std::size_t i = 0; i < owners.size(); ++i) {
      const double slow = step <= burst_until && owners[i] == burst ? 2 : 1;
      const double factor = of_rank[owners[i].index()] * slow * (1 + 0.03 * draw.normal());
      seen.push_back(cost::sample_of(costs.layers[i], factor));
      if ((*load)->counts_work()) seen.back().work = costs.layers[i].forward_s;
    }
    const auto& found = speeds.add(seen, owners);
    ASSERT_TRUE(found.empty()) << "step " << step << ": " << found[0].rank.value << " x "
                               << found[0].factor;
  }
}

INSTANTIATE_TEST_SUITE_P(Sources, NoFalseAlarm,
                         ::testing::Values("moe", "pruning", "freezing", "sparse-attention",
                                           "early-exit", "mixture-of-depths"),
                         [](const auto& each) {
                           std::string name = each.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace dynmo::control
