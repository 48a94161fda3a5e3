// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/mixture_of_depths/load.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/dynamism/shapes.h"

namespace dynmo::dynamism {
namespace {

MixtureOfDepthsOptions without_noise() {
  MixtureOfDepthsOptions p;
  p.noise = 0;
  return p;
}

TEST(MixtureOfDepths, RoutesAtLeastOneToken) {
  EXPECT_EQ(routed_tokens(0.125, 2048), 256);
  EXPECT_EQ(routed_tokens(0.125, 20), 3);  // 2.5 rounds away from 0
  EXPECT_EQ(routed_tokens(0, 100), 1);
  EXPECT_EQ(routed_tokens(1, 100), 100);
}

// Raposo et al. 2024, at a capacity of 12.5 %: products x 0.125, core x 1/64 as it is quadratic in
// the tokens, router 2 T h and the predictor's two products; every other block routed is (1 +
// 0.125) / 2 = 56 % of the products.
TEST(MixtureOfDepths, MatchesItsClosedForm) {
  const LoadInputs inputs = inputs_of(gpt(8, 512, 2048));
  const auto all = dense(inputs);
  const auto now = (*make_mixture_of_depths(without_noise(), inputs))->at(0);
  const auto work = cost::transformer_work(inputs.shape);
  double linear = 0;
  for (std::size_t block = 0; block < 8; ++block) {
    const std::size_t i = 1 + 2 * block;
    linear += now.layers[i + 1].forward_s / all.layers[i + 1].forward_s / 8;
    if (block % 2 == 0) {
      EXPECT_EQ(now.layers[i], all.layers[i]);
      EXPECT_EQ(now.layers[i + 1], all.layers[i + 1]);
      continue;
    }
    const double router = 2.0 * 2048 * (512 + 512 * 64 + 64);
    const double attention = (work[i].matrix_flops / 8 + work[i].core_flops / 64 + router) / 1e12;
    EXPECT_NEAR(now.layers[i].forward_s, attention, 1e-9 * attention);
    EXPECT_DOUBLE_EQ(now.layers[i + 1].forward_s, all.layers[i + 1].forward_s / 8);
    // Weights stay, and those of router and predictor come: cheap but heavy.
    EXPECT_EQ((now.layers[i].parameter_bytes - all.layers[i].parameter_bytes).value,
              2 * (512 + 512 * 64 + 2 * 64 + 1));
    EXPECT_EQ(now.layers[i + 1].optimizer_bytes, all.layers[i + 1].optimizer_bytes);
    EXPECT_NEAR(
        static_cast<double>(now.layers[i].activation_bytes.value),
        static_cast<double>(all.layers[i].activation_bytes.value) / 8 + 2 * 2048 * (512 + 64), 1);
    EXPECT_EQ(now.layers[i].boundary_bytes, all.layers[i].boundary_bytes);
  }
  EXPECT_NEAR(linear, 0.5625, 1e-12);
}

// Router and experts of a routed block work on the chosen rows; their parameters stay.
TEST(MixtureOfDepths, ExpertsWorkOnTheChosenTokens) {
  const LoadInputs inputs = inputs_of(mixture(4, 8, 2));
  const auto all = dense(inputs);
  const auto now = (*make_mixture_of_depths(without_noise(), inputs))->at(0);
  for (const std::size_t i : {2U, 6U}) EXPECT_EQ(now.layers[i], all.layers[i]);
  for (const std::size_t i : {4U, 8U}) {
    EXPECT_DOUBLE_EQ(now.layers[i].forward_s, all.layers[i].forward_s / 8);
    EXPECT_EQ(now.layers[i].parameter_bytes, all.layers[i].parameter_bytes);
  }
}

TEST(MixtureOfDepths, EveryBlockAtFullCapacityIsDenseButForRouterAndPredictor) {
  const LoadInputs inputs = inputs_of(gpt(4, 512, 512));
  MixtureOfDepthsOptions p = without_noise();
  p.capacity = 1;
  p.every = 1;
  const auto now = (*make_mixture_of_depths(p, inputs))->at(0);
  const auto all = dense(inputs);
  for (int b = 0; b < 4; ++b) {
    EXPECT_NEAR(block_work(now, b) - block_work(all, b),
                3 * 2.0 * 512 * (512 + 512 * 64 + 64) / 1e12, 1e-12);
  }
}

TEST(MixtureOfDepths, OnlyNoiseChangesWithTime) {
  const LoadInputs inputs = inputs_of(gpt(8, 512, 512), 9);
  const auto mean = (*make_mixture_of_depths(without_noise(), inputs))->at(0);
  const auto load = make_mixture_of_depths({}, inputs);
  double squares = 0;
  int count = 0;
  for (std::int64_t step = 0; step < 200; ++step) {
    const auto now = (*load)->at(step);
    for (std::size_t i = 1; i < now.layers.size(); ++i) {
      const double off = now.layers[i].forward_s / mean.layers[i].forward_s - 1;
      ASSERT_LE(std::abs(off), 4 * 0.005 + 1e-12);
      squares += off * off;
      ++count;
    }
  }
  EXPECT_NEAR(std::sqrt(squares / count), 0.005, 0.0005);
}

TEST(MixtureOfDepths, FaultsNameTheField) {
  MixtureOfDepthsOptions p;
  p.capacity = -0.5;
  EXPECT_EQ(make_mixture_of_depths(p, inputs_of(gpt(1, 512, 512))).error().message,
            "mixture_of_depths.capacity is -0.5, wanted above 0 and at most 1");
}

}  // namespace
}  // namespace dynmo::dynamism
