// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/early_exit/load.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/dynamism/shapes.h"

namespace dynmo::dynamism {
namespace {

constexpr int kNoBatchNoise = 1'000'000'000;  // micro-batches a step

// Survivors fall as survivors^(b / exits), the same in every step.
EarlyExitOptions geometric(double survivors, std::int64_t exit_every = 1) {
  EarlyExitOptions p;
  p.survivors = survivors;
  p.exit_every = exit_every;
  p.exit_spread = p.drift = 0;
  p.warm_up = 0;
  p.ramp_steps = 1;
  return p;
}

TEST(EarlyExit, SurvivorsAreGeometricInDepth) {
  const auto rho = survivors(geometric(0.1), 24, std::int64_t{2048} * kNoBatchNoise, 1, 1000);
  ASSERT_EQ(rho.size(), 25U);
  for (std::size_t b = 0; b < 24; ++b) {
    EXPECT_NEAR(rho[b], std::pow(0.1, static_cast<double>(b) / 23), 1e-5) << b;
  }
  EXPECT_EQ(rho[24], rho[23]);  // no exit behind the last block: its head is the model's
}

TEST(EarlyExit, SurvivorsNeverGrowAndStartWhole) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    EarlyExitOptions p;
    p.exit_every = 1 + static_cast<std::int64_t>(seed % 5);
    const auto step = static_cast<std::int64_t>(seed * 50);
    const auto rho = survivors(p, 30, 100, seed, step);
    ASSERT_EQ(rho.front(), 1) << "seed " << seed;
    for (std::size_t b = 1; b < rho.size(); ++b) {
      ASSERT_LE(rho[b], rho[b - 1]) << "seed " << seed;
      ASSERT_GE(rho[b], 0) << "seed " << seed;
      if (b % static_cast<std::size_t>(p.exit_every) != 0) {
        ASSERT_EQ(rho[b], rho[b - 1]);
      }
    }
    if (step < p.warm_up) {
      ASSERT_EQ(rho.back(), 1) << "seed " << seed;
    }
  }
}

// Confidence rises while a model trains, so fewer tokens survive: slow drift, and the noise of a
// binomial share of T tokens, sqrt(rho (1 - rho) / T).
TEST(EarlyExit, ModelsGetSurer) {
  const EarlyExitOptions p;
  const auto last = [&](std::int64_t step) { return survivors(p, 32, 2048 * 32, 7, step).back(); };
  EXPECT_EQ(last(0), 1);
  EXPECT_EQ(last(499), 1);
  EXPECT_GT(last(1000), last(3000));
  EXPECT_GT(last(3000), last(9000));
  EXPECT_NEAR(last(20'000), 0.1, 0.01);
}

TEST(EarlyExit, BatchNoiseIsThatOfDrawnTokens) {
  const EarlyExitOptions p = geometric(0.25);
  constexpr int kSteps = 4000;
  double squares = 0;
  for (int step = 0; step < kSteps; ++step) {
    const double off = survivors(p, 2, 400, 3, 1000 + step)[1] - 0.25;
    squares += off * off / kSteps;
  }
  EXPECT_NEAR(std::sqrt(squares), std::sqrt(0.25 * 0.75 / 400), 0.001);
}

// With rho of the tokens left, products cost rho, attention's core rho x the keys' share (rho where
// tokens are removed, 1 where their keys and values are propagated as in CALM, Schuster et al.
// 2022); messages and stash are those of survivors.
TEST(EarlyExit, RemovedTokensCostNothingMore) {
  LoadInputs inputs = inputs_of(gpt(9, 512, 4096));
  inputs.micro_batches = kNoBatchNoise;
  const auto all = dense(inputs);
  EarlyExitOptions p = geometric(0.5, 8);  // one exit, behind block 7
  const auto now = (*make_early_exit(p, inputs))->at(1000);
  for (std::size_t i = 1; i <= 15; ++i) {  // before it
    EXPECT_EQ(now.layers[i], all.layers[i]) << i;
  }
  const double rho = survivors(p, 9, std::int64_t{4096} * kNoBatchNoise, 1, 1000)[8];
  const auto& attention = all.layers[17];
  const cost::LayerWork work = cost::transformer_work(inputs.shape)[17];
  const double expected = (work.matrix_flops * rho + work.core_flops * rho * rho) / 1e12;
  EXPECT_NEAR(now.layers[17].forward_s, expected, 1e-6 * expected);
  EXPECT_NEAR(now.layers[18].forward_s, all.layers[18].forward_s * rho, 1e-9);
  EXPECT_NEAR(static_cast<double>(now.layers[17].activation_bytes.value),
              rho * static_cast<double>(attention.activation_bytes.value), 1);
  EXPECT_NEAR(static_cast<double>(now.layers[17].boundary_bytes.value),
              rho * static_cast<double>(attention.boundary_bytes.value + 4 * 4096), 1);
  EXPECT_EQ(now.layers[17].parameter_bytes, attention.parameter_bytes);

  p.exited = ExitedTokens::kPropagated;
  const auto kept = (*make_early_exit(p, inputs))->at(1000);
  // Keys and values in full (a third of 4 h^2 counted with the output projection: one half).
  const double half = (work.matrix_flops * (0.5 + 0.5 * rho) + work.core_flops * rho) / 1e12;
  EXPECT_NEAR(kept.layers[17].forward_s, half, 1e-6 * half);
  EXPECT_EQ(kept.layers[17].boundary_bytes, attention.boundary_bytes);
  EXPECT_EQ(kept.layers[18].forward_s, now.layers[18].forward_s);
}

// Every token's loss is taken once, wherever it leaves: the heads together do one head's work, and
// the tests 2 T h each.
TEST(EarlyExit, HeadsDoOneHeadsWorkTogether) {
  LoadInputs inputs = inputs_of(gpt(12, 512, 512));
  inputs.micro_batches = kNoBatchNoise;
  const auto all = dense(inputs);
  EarlyExitOptions p = geometric(0.2, 4);
  p.confidence = ExitConfidence::kSimilarity;
  p.exit_loss = 0;
  const auto now = (*make_early_exit(p, inputs))->at(1000);
  const auto rho = survivors(p, 12, std::int64_t{512} * kNoBatchNoise, 1, 1000);
  double heads = now.layers.back().forward_s;
  for (const std::size_t block : {3U, 7U}) {
    const std::size_t mlp = 2 + 2 * block;
    const double test = 2 * rho[block] * 512 * 512 / 1e12;
    heads += now.layers[mlp].forward_s - all.layers[mlp].forward_s * rho[block] - test;
    EXPECT_EQ((now.layers[mlp].parameter_bytes - all.layers[mlp].parameter_bytes).value,
              2 * (50'304 * 512 + 2 * 512));
  }
  EXPECT_NEAR(heads, all.layers.back().forward_s, 1e-9);
}

// A head that all tokens learn at runs on all that come; one whose scores decide goes forward on
// them.
TEST(EarlyExit, HeadsThatTeachWorkOnAllThatCome) {
  LoadInputs inputs = inputs_of(gpt(12, 512, 512));
  inputs.micro_batches = kNoBatchNoise;
  const auto all = dense(inputs);
  EarlyExitOptions p = geometric(0.2, 4);
  const auto rho = survivors(p, 12, std::int64_t{512} * kNoBatchNoise, 1, 1000);
  const double head = all.layers.back().forward_s;
  const auto of_exit = [&] {
    const double test = 2 * rho[7] * 512 * 512 / 1e12;
    const cost::LayerCost exit = (*make_early_exit(p, inputs))->at(1000).layers[16];
    return (exit.forward_s + exit.backward_input_s + exit.backward_weight_s) / 3 -
           all.layers[16].forward_s * rho[7] - test;
  };
  EXPECT_NEAR(of_exit(), rho[7] * head, 1e-9);
  p.exit_loss = 0;
  EXPECT_NEAR(of_exit(), (rho[7] + 2 * (rho[7] - rho[8])) / 3 * head, 1e-9);
  p.confidence = ExitConfidence::kClassifier;
  EXPECT_NEAR(of_exit(), rho[7] * head, 1e-9);
}

// With heads in slices the layers of a block and its exit do the work that they do with whole ones,
// none of them more than a block's MLP and a slice; what passes between slices is twice as wide.
TEST(EarlyExit, HeadsInSlicesDoTheSameWorkInMoreLayers) {
  constexpr int kSlices = 7;
  LoadInputs inputs = inputs_of(gpt(12, 512, 512));
  inputs.micro_batches = kNoBatchNoise;
  const EarlyExitOptions p = geometric(0.2, 4);
  const auto whole = (*make_early_exit(p, inputs))->at(1000);
  const auto rho = survivors(p, 12, std::int64_t{512} * kNoBatchNoise, 1, 1000);
  inputs.shape.head_slices = kSlices;
  const auto sliced = (*make_early_exit(p, inputs))->at(1000);
  ASSERT_EQ(sliced.size(), whole.size() + 3 * (kSlices - 1));  // two exits and the head
  std::size_t next = 0;
  for (std::size_t l = 0; l < whole.layers.size(); ++l) {
    const cost::LayerCost& one = whole.layers[l];
    const bool exit = one.name == "blocks.3.mlp" || one.name == "blocks.7.mlp";
    const int slices = exit || one.name == "head" ? kSlices : 1;
    cost::LayerCost sum;
    for (int slice = 0; slice < slices; ++slice) {
      const cost::LayerCost& part = sliced.layers[next++];
      sum.forward_s += part.forward_s;
      sum.backward_input_s += part.backward_input_s;
      sum.backward_weight_s += part.backward_weight_s;
      sum.parameter_bytes += part.parameter_bytes;
      if (exit && slice > 0) {
        EXPECT_EQ(part.name, fmt::format("{}.exit.{} of 7", one.name.substr(0, 8), slice));
        EXPECT_LT(part.forward_s, 0.2 * one.forward_s);
      }
      if (exit && slice + 1 < slices) {
        const double come = rho[one.name == "blocks.3.mlp" ? 3 : 7];
        const double index = come < 1 ? 4 : 0;
        EXPECT_NEAR(static_cast<double>(part.boundary_bytes.value),
                    come * 512 * (4 * (2 * 512 + 6) + index), 1);
      }
      if (slice + 1 == slices) {
        EXPECT_EQ(part.boundary_bytes, one.boundary_bytes) << one.name;
      }
    }
    EXPECT_NEAR(sum.forward_s, one.forward_s, 1e-9) << one.name;
    EXPECT_NEAR(sum.backward_input_s, one.backward_input_s, 1e-9) << one.name;
    EXPECT_NEAR(sum.backward_weight_s, one.backward_weight_s, 1e-9) << one.name;
    EXPECT_EQ(sum.parameter_bytes, one.parameter_bytes) << one.name;
  }
  EXPECT_EQ(next, sliced.layers.size());
}

// Router and experts work on the rows that are left; their parameters stay.
TEST(EarlyExit, ExpertsWorkOnTheTokensThatStay) {
  LoadInputs inputs = inputs_of(mixture(9, 8, 2));
  inputs.micro_batches = kNoBatchNoise;
  const auto all = dense(inputs);
  const EarlyExitOptions p = geometric(0.5, 8);
  const auto now = (*make_early_exit(p, inputs))->at(1000);
  const double rho =
      survivors(p, 9, inputs.shape.tokens() * std::int64_t{kNoBatchNoise}, 1, 1000)[8];
  EXPECT_NEAR(rho, 0.5, 1e-4);
  const cost::LayerCost& whole = all.layers[18];
  ASSERT_EQ(whole.name, "blocks.8.moe");
  EXPECT_EQ(now.layers[14], all.layers[14]);
  EXPECT_NEAR(now.layers[18].forward_s, whole.forward_s * rho, 1e-9);
  EXPECT_NEAR(now.layers[18].backward_weight_s, whole.backward_weight_s * rho, 1e-9);
  EXPECT_NEAR(static_cast<double>(now.layers[18].activation_bytes.value),
              rho * static_cast<double>(whole.activation_bytes.value), 1);
  EXPECT_EQ(now.layers[18].parameter_bytes, whole.parameter_bytes);
}

TEST(EarlyExit, WithoutExitsItIsTheDenseModel) {
  const LoadInputs inputs = inputs_of(gpt(6, 512, 512));
  EXPECT_EQ((*make_early_exit(geometric(0.1, 6), inputs))->at(900), dense(inputs));
}

TEST(EarlyExit, FaultsNameTheField) {
  const LoadInputs inputs = inputs_of(gpt(1, 512, 512));
  EarlyExitOptions p;
  p.survivors = 0;
  EXPECT_NE(make_early_exit(p, inputs).error().message.find("early_exit.survivors is 0"),
            std::string::npos);
  p = {};
  p.exit_every = 0;
  EXPECT_NE(make_early_exit(p, inputs).error().message.find("exit_every"), std::string::npos);
}

}  // namespace
}  // namespace dynmo::dynamism
