// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/slow_rank.h"

#include <gtest/gtest.h>

#include <functional>

#include "dynmo/core/rng.h"

namespace dynmo::control {
namespace {

const plan::Plan kPlan = plan::make_plan({2, 3, 3}, schedule::ScheduleKind::k1F1B);

struct Found {
  int step;
  int rank;
  double factor;
};

// Returns what is reported over `steps` steps of layers with the given times by (step, layer).
std::vector<Found> watch(int steps, const std::function<double(int, int)>& time_of,
                         const plan::Plan& plan = kPlan) {
  SlowRankDetector detector;
  std::vector<Found> found;
  for (int step = 0; step < steps; ++step) {
    std::vector<cost::LayerSample> layers(8);
    for (int layer = 0; layer < 8; ++layer) {
      layers[static_cast<std::size_t>(layer)].time.forward_s = time_of(step, layer);
    }
    if (const auto slow = detector.add(layers, plan)) {
      found.push_back({step, slow->rank.value, slow->factor});
    }
  }
  return found;
}

bool on_rank_1(int layer) { return layer >= 2 && layer < 5; }

TEST(SlowRank, IsNamedOnceWithItsFactor) {
  const auto found = watch(200, [](int step, int layer) {
    return (1 + layer) * (step >= 50 && on_rank_1(layer) ? 3 : 1);
  });
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].rank, 1);
  EXPECT_EQ(found[0].step, 52);  // the third of five is the median
  EXPECT_DOUBLE_EQ(found[0].factor, 3);
}

TEST(SlowRank, IsNotOneWithASlowerLayer) {
  EXPECT_TRUE(watch(200, [](int step, int layer) {
                return step >= 50 && (layer == 2 || layer == 3) ? 5.0 : 1.0;
              }).empty());
}

TEST(SlowRank, IsNoneWhereAllAreSlower) {
  EXPECT_TRUE(watch(200, [](int step, int) { return step >= 50 ? 4.0 : 1.0; }).empty());
  const auto found = watch(200, [](int step, int layer) {
    return step < 50 ? 1.0 : on_rank_1(layer) ? 4.0 : 2.0;
  });
  ASSERT_EQ(found.size(), 1u);
  EXPECT_DOUBLE_EQ(found[0].factor, 2);
}

TEST(SlowRank, IsNoneWhereOthersBecomeFaster) {
  EXPECT_TRUE(
      watch(200, [](int step, int layer) { return step >= 50 && layer < 5 ? 0.3 : 1.0; }).empty());
}

TEST(SlowRank, IsNoneForAMomentOrForNoise) {
  EXPECT_TRUE(watch(200, [](int step, int layer) {
                return step % 7 < 2 && on_rank_1(layer) ? 10.0 : 1.0;
              }).empty());
  Rng draw(1);
  EXPECT_TRUE(watch(2000, [&](int, int) { return 1 + draw.uniform(); }).empty());
}

TEST(SlowRank, HasLayersThatCameFromAnother) {
  SlowRankDetector detector;
  const plan::Plan after = plan::make_plan({1, 4, 3}, schedule::ScheduleKind::k1F1B, 1);
  std::optional<SlowRank> found;
  for (int step = 0; step < 60 && !found; ++step) {
    std::vector<cost::LayerSample> layers(8);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      layers[i].time.forward_s = step >= 40 && i >= 1 && i < 5 ? 2.0 : 1.0;
    }
    found = detector.add(layers, step < 40 ? kPlan : after);
  }
  ASSERT_TRUE(found);
  EXPECT_EQ(found->rank, Rank(1));
}

}  // namespace
}  // namespace dynmo::control
