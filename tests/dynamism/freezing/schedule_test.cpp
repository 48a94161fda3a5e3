// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/core/rng.h"

namespace dynmo::dynamism {
namespace {

FreezingSchedule ramp(double start, double end, double fraction, std::int64_t every = 1) {
  return {.start = start, .end = end, .fraction = fraction, .every = every};
}

TEST(Freezing, RampsLinearlyInWholeLayers) {
  const FreezingSchedule schedule = ramp(0.2, 0.7, 0.5);
  EXPECT_EQ(frozen_layers(schedule, 0, 100, 20), 0);
  EXPECT_EQ(frozen_layers(schedule, 20, 100, 20), 0);
  EXPECT_EQ(frozen_layers(schedule, 24, 100, 20), 0);
  EXPECT_EQ(frozen_layers(schedule, 25, 100, 20), 1);
  EXPECT_EQ(frozen_layers(schedule, 45, 100, 20), 5);
  EXPECT_EQ(frozen_layers(schedule, 69, 100, 20), 9);
  EXPECT_EQ(frozen_layers(schedule, 70, 100, 20), 10);
  EXPECT_EQ(frozen_layers(schedule, 99, 100, 20), 10);
}

TEST(Freezing, NeverFreezesTheHead) {
  EXPECT_EQ(frozen_layers(ramp(0, 0, 1), 0, 10, 8), 7);
  EXPECT_EQ(frozen_layers(ramp(0, 0, 1), 5, 10, 1), 0);
}

TEST(Freezing, RoundingLosesNoLayer) { EXPECT_EQ(frozen_layers(ramp(0, 0, 0.29), 1, 10, 100), 29); }

TEST(Freezing, NeverShrinksAndChangesOnlyWhereItMay) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(mix_key({0xF4EE2E, seed}));
    const double start = rng.uniform();
    const double end = start + (1 - start) * rng.uniform();
    const FreezingSchedule schedule =
        ramp(start, end, rng.uniform(), 1 + static_cast<std::int64_t>(rng.below(12)));
    ASSERT_TRUE(check(schedule));
    const auto steps = 1 + static_cast<std::int64_t>(rng.below(200));
    const auto layers = 1 + static_cast<int>(rng.below(40));
    int before = frozen_layers(schedule, 0, steps, layers);
    for (std::int64_t step = 1; step < 2 * steps; ++step) {
      const int now = frozen_layers(schedule, step, steps, layers);
      ASSERT_GE(now, before) << "seed " << seed << ", step " << step;
      ASSERT_LE(now, layers - 1) << "seed " << seed;
      ASSERT_LE(now, schedule.fraction * layers + 1e-6) << "seed " << seed;
      if (step % schedule.every != 0) {
        ASSERT_EQ(now, before) << "seed " << seed << ", step " << step;
      }
      before = now;
    }
  }
}

TEST(Freezing, FaultsNameTheField) {
  EXPECT_EQ(check(ramp(-0.1, 1, 1)).error().message, "freezing.start is -0.1, wanted 0 to 1");
  EXPECT_NE(check(ramp(0, 1, std::nan(""))).error().message.find("fraction"), std::string::npos);
  EXPECT_EQ(check(ramp(0.8, 0.2, 1)).error().message,
            "freezing.start is 0.8, wanted at most freezing.end, which is 0.2");
  EXPECT_NE(check(ramp(0, 1, 1, 0)).error().message.find("every is 0"), std::string::npos);
}

cost::ModelCost model_of(int layers) {
  cost::ModelCost model;
  for (int i = 0; i < layers; ++i) {
    cost::LayerCost layer;
    layer.name = std::to_string(i);
    layer.forward_s = 1;
    layer.backward_input_s = 2;
    layer.backward_weight_s = 3;
    layer.update_s = 4;
    layer.parameter_bytes = Bytes{10};
    layer.gradient_bytes = Bytes{20};
    layer.optimizer_bytes = Bytes{30};
    layer.activation_bytes = Bytes{40};
    layer.boundary_bytes = Bytes{50};
    model.layers.push_back(layer);
  }
  return model;
}

TEST(Freezing, AFrozenPrefixKeepsForwardAndParametersOnly) {
  const cost::ModelCost before = model_of(4);
  const cost::ModelCost after = freeze_prefix(before, 2);
  EXPECT_EQ(after.frozen_layers(), 2);
  EXPECT_EQ(cost::layer_work_s(after, 2), (std::vector<double>{1, 1, 8, 8}));
  EXPECT_EQ(cost::state_bytes(after.layers[0]), Bytes{10});
  EXPECT_EQ(after.layers[1].activation_bytes, Bytes{0});
  EXPECT_EQ(after.layers[1].boundary_bytes, Bytes{50});  // its output is still sent on
  EXPECT_EQ(after.layers[2], before.layers[2]);
  EXPECT_EQ(freeze_prefix(before, 0), before);
  EXPECT_EQ(freeze_prefix(before, 9).frozen_layers(), 3);
  EXPECT_EQ(freeze_prefix(after, 1), after);
}

// The planner's own reading of a frozen flag and the load model's agree.
TEST(Freezing, DroppingTheCostsChangesNoWork) {
  const cost::ModelCost dropped = freeze_prefix(model_of(6), 3);
  cost::ModelCost flagged = model_of(6);
  for (std::size_t i = 0; i < 3; ++i) flagged.layers[i].frozen = true;
  EXPECT_EQ(cost::layer_work_s(dropped, 4), cost::layer_work_s(flagged, 4));
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(cost::state_bytes(dropped.layers[i]), cost::state_bytes(flagged.layers[i]));
  }
}

}  // namespace
}  // namespace dynmo::dynamism
