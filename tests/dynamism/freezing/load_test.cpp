// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/freezing/load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "dynmo/dynamism/freezing/schedule.h"
#include "tests/dynamism/shapes.h"

namespace dynmo::dynamism {
namespace {

FreezingOptions by_plasticity() { return {.rule = FreezingRule::kPlasticity}; }

FreezingOptions quiet() {
  FreezingOptions p = by_plasticity();
  p.rate_spread = p.slope_noise = p.bootstrap = 0;
  p.check_every = 1;
  p.patience = 1;
  p.max_fraction = 1;
  return p;
}

// Closed form of the rule: the slope exp(-rate x) is below the tolerance from
// x = ln(1 / tolerance) / rate on.
TEST(FreezingLoad, WithoutNoiseABlockFreezesWhenItsSlopeHasFallen) {
  const FreezingOptions p = quiet();
  constexpr std::int64_t kSteps = 100'000;
  const auto at = freezing_steps(p, 12, kSteps, 1);
  for (int b = 0; b < 12; ++b) {
    const double rate = p.front_rate * std::pow(p.back_rate / p.front_rate, b / 11.0);
    const double share = std::log(1 / p.tolerance) / rate;
    const auto expected = static_cast<double>(std::min(1.0, share) * kSteps);
    EXPECT_NEAR(static_cast<double>(at[static_cast<std::size_t>(b)]), expected, 1.5) << b;
  }
  EXPECT_EQ(at.back(), kSteps);  // ln 5 / 1.5 > 1: never
}

TEST(FreezingLoad, BlocksFreezeInOrderAtChecks) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    const FreezingOptions p;
    const auto at = freezing_steps(p, 32, 10'000, seed);
    ASSERT_TRUE(std::is_sorted(at.begin(), at.end())) << "seed " << seed;
    for (const std::int64_t step : at) {
      if (step < 10'000) {
        ASSERT_EQ((step - 500) % 300, 0) << "seed " << seed;
      }
    }
    const auto frozen = std::count_if(at.begin(), at.end(), [](auto s) { return s <= 8000; });
    ASSERT_GE(frozen, 16) << "seed " << seed;
    ASSERT_LE(frozen, 24) << "seed " << seed;  // max_fraction
  }
}

TEST(FreezingLoad, APrefixRunsForwardOnly) {
  const LoadInputs inputs = inputs_of(gpt(8, 512, 512));
  const auto load = make_freezing(by_plasticity(), inputs);
  const auto all = dense(inputs);
  int before = 0;
  int changes = 0;
  for (std::int64_t step = 0; step < 10'000; step += 50) {
    const auto now = (*load)->at(step);
    const int frozen = now.frozen_layers();
    ASSERT_EQ(now, freeze_prefix(all, frozen));
    ASSERT_TRUE(frozen == 0 || frozen % 2 == 1) << frozen;  // the embedding and whole blocks
    ASSERT_GE(frozen, before);
    ASSERT_EQ(((*load)->announced_at(step) != cost::Announced::kNothing), frozen != before)
        << step;  // checks are at multiples of 50
    changes += frozen != before;
    before = frozen;
  }
  EXPECT_EQ(before, 1 + 2 * 6);  // 75 % of 8 blocks
  EXPECT_GT(changes, 2);
}

TEST(FreezingLoad, TheNormRuleHasTheCurveOfPlasticity) {
  const LoadInputs inputs = inputs_of(gpt(8, 512, 512));
  const auto plasticity = make_freezing(by_plasticity(), inputs);
  const auto norm = make_freezing({.rule = FreezingRule::kNorm}, inputs);
  for (std::int64_t step = 0; step < 10'000; step += 500) {
    ASSERT_EQ((*norm)->at(step), (*plasticity)->at(step)) << step;
  }
}

// F, I and W take about the same time. A layer frozen behind one that trains still passes gradients
// on, F + I: 2 of 3; a frozen prefix runs forward only: 1 of 3.
TEST(FreezingLoad, RandomBlocksSkipTheirWeightGradientsOnly) {
  const LoadInputs inputs = inputs_of(gpt(8, 512, 512));
  FreezingOptions p;
  p.rule = FreezingRule::kRandom;
  p.max_fraction = 0.5;
  const auto load = make_freezing(p, inputs);
  const auto all = dense(inputs);
  const auto now = (*load)->at(9999);
  EXPECT_EQ(now.frozen_layers(), 0);  // the embedding trains on
  int frozen = 0;
  for (int b = 0; b < 8; ++b) {
    const cost::LayerCost& mlp = now.layers[static_cast<std::size_t>(2 + 2 * b)];
    const cost::LayerCost& full = all.layers[static_cast<std::size_t>(2 + 2 * b)];
    if (!mlp.frozen) {
      EXPECT_EQ(mlp, full);
      continue;
    }
    ++frozen;
    EXPECT_NEAR(cost::work_s(now, 2 + 2 * b, 1 << 30), 2 * full.forward_s, 1e-12);
    EXPECT_EQ(mlp.optimizer_bytes, Bytes{0});
    EXPECT_EQ(mlp.activation_bytes, full.activation_bytes);
  }
  EXPECT_EQ(frozen, 4);
  EXPECT_EQ((*load)->at(0), all);
}

TEST(FreezingLoad, TheScheduleIsComposersRamp) {
  const LoadInputs inputs = inputs_of(gpt(8, 512, 512), 1, 1000);
  const FreezingOptions p;
  const auto load = make_freezing(p, inputs);
  for (const std::int64_t step : {0, 500, 700, 999}) {
    EXPECT_EQ((*load)->at(step).frozen_layers(), frozen_layers(p.schedule, step, 1000, 18));
  }
}

TEST(FreezingLoad, FaultsNameTheField) {
  const LoadInputs inputs = inputs_of(gpt(1, 512, 512));
  FreezingOptions p;
  p.tolerance = 2;
  EXPECT_EQ(make_freezing(p, inputs).error().message, "freezing.tolerance is 2, wanted 0 to 1");
  p = {};
  p.schedule.every = 0;
  EXPECT_NE(make_freezing(p, inputs).error().message.find("every is 0"), std::string::npos);
  p = {};
  p.check_every = 1;
  EXPECT_NE(make_freezing(p, inputs_of(gpt(1, 512, 512), 1, 900'000'000))
                .error()
                .message.find("check_every"),
            std::string::npos);
}

}  // namespace
}  // namespace dynmo::dynamism
