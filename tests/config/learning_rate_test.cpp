// SPDX-License-Identifier: Apache-2.0
#include "dynmo/config/learning_rate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

namespace dynmo::config {
namespace {

TEST(LearningRate, WarmsUpThenFallsAlongACosine) {
  const LearningRateOptions options{
      .peak = 1, .minimum = 0.1, .warmup_steps = 10, .total_steps = 110};
  EXPECT_DOUBLE_EQ(learning_rate(options, 0), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 9), 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 10), 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 60), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(options, 110), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 100000), 0.1);
  for (std::int64_t step = 10; step < 110; ++step) {
    EXPECT_GT(learning_rate(options, step), learning_rate(options, step + 1)) << step;
  }
}

TEST(LearningRate, FallsAlongALineOrStaysAndFallsAtTheEnd) {
  LearningRateOptions options{.peak = 1, .minimum = 0.2, .warmup_steps = 10, .total_steps = 110};
  options.decay = parse_decay("linear").value();
  EXPECT_DOUBLE_EQ(learning_rate(options, 10), 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 60), 0.6);
  EXPECT_DOUBLE_EQ(learning_rate(options, 110), 0.2);
  options.decay = parse_decay("wsd").value();
  options.decay_share = 0.25;
  for (const std::int64_t step : {9, 10, 50, 85}) EXPECT_DOUBLE_EQ(learning_rate(options, step), 1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 95), 0.2 + 0.8 * 15 / 25);
  EXPECT_DOUBLE_EQ(learning_rate(options, 110), 0.2);
  EXPECT_FALSE(parse_decay("cosin"));
}

TEST(LearningRate, WithoutWarmupStartsAtThePeak) {
  EXPECT_DOUBLE_EQ(learning_rate({.peak = 2, .minimum = 0, .warmup_steps = 0, .total_steps = 4}, 0),
                   2);
  EXPECT_DOUBLE_EQ(learning_rate({.peak = 2, .minimum = 0, .warmup_steps = 4, .total_steps = 4}, 4),
                   0);
}

TEST(LearningRate, OptionsThatMakeNoSenseAreRefused) {
  EXPECT_TRUE(validate(LearningRateOptions{}));
  EXPECT_FALSE(validate(LearningRateOptions{.peak = 1, .minimum = 2}));
  EXPECT_FALSE(validate(LearningRateOptions{.peak = INFINITY}));
  EXPECT_EQ(validate(LearningRateOptions{.warmup_steps = 20, .total_steps = 10}).error().message,
            "learning rate: warmup_steps is 20 and total_steps 10, wanted 0 <= warmup_steps <= "
            "total_steps and at least one step");
}

}  // namespace
}  // namespace dynmo::config
