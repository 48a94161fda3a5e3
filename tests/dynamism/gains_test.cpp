// SPDX-License-Identifier: Apache-2.0
//
// The gains of balancing alone are rebuilt here from the load models, the balancers and the
// simulator. The expected figures are those of a simulation of 1F1B that was written apart from
// this program. 1F1B, M = 4 P, no communication, whole blocks as layers; speed-up of the exact
// contiguous cut over the even one.

#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "dynmo/dynamism/early_exit/load.h"
#include "dynmo/dynamism/freezing/load.h"
#include "dynmo/dynamism/freezing/schedule.h"
#include "dynmo/dynamism/mixture_of_depths/load.h"
#include "dynmo/dynamism/moe/load.h"
#include "dynmo/dynamism/pruning/load.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"
#include "tests/dynamism/shapes.h"

namespace dynmo::dynamism {
namespace {

struct Pipeline {
  int blocks;
  int ranks;
};
constexpr std::array<Pipeline, 5> kPipelines = {{{24, 4}, {24, 8}, {32, 8}, {48, 8}, {48, 16}}};

// Blocks of products only, F = I = W, and embedding and head next to nothing.
LoadInputs products(int blocks) {
  cost::TransformerShape shape = gpt(blocks, 1024, 1);
  shape.micro_batch_size = 512;
  shape.vocabulary = 1;
  return inputs_of(shape);
}

// Half blocks joined to blocks, the head to the last one or left as a layer of its own; without the
// embedding.
cost::ModelCost whole_blocks(const cost::ModelCost& model, Ends ends) {
  cost::ModelCost joined;
  for (std::size_t i = 1; i + 1 < model.layers.size(); i += 2) {
    cost::LayerCost block = model.layers[i];
    const cost::LayerCost& second = model.layers[i + 1];
    block.forward_s += second.forward_s;
    block.backward_input_s += second.backward_input_s;
    block.backward_weight_s += second.backward_weight_s;
    block.update_s = 0;
    joined.layers.push_back(block);
  }
  if (ends == Ends::kKept) joined.layers.push_back(model.layers.back());
  return joined;
}

struct Gain {
  double speed_up = 0;
  double bubble_before = 0;
  double bubble_after = 0;
};

Gain gain_of(const cost::ModelCost& model, int ranks, const std::vector<int>& even) {
  const cost::Cluster cluster = cost::equal_ranks(ranks);
  const int micro_batches = 4 * ranks;
  const auto best = plan::balance(plan::Balancer::kOptimal, {{model, cluster, micro_batches}});
  EXPECT_TRUE(best);
  const auto evaluate = [&](const std::vector<int>& counts) {
    return plan::evaluate(plan::make_plan(counts, schedule::ScheduleKind::k1F1B),
                          {model, cluster, micro_batches})
        .value();
  };
  const auto bubble = [&](const plan::Evaluation& e) {
    return 1 - e.ideal_step_time_s / e.step_time_s;
  };
  const auto before = evaluate(even);
  const auto after = evaluate(*best);
  return {before.step_time_s / after.step_time_s, bubble(before), bubble(after)};
}

Gain gain_of(const cost::ModelCost& blocks, int ranks) {
  return gain_of(blocks, ranks,
                 std::vector<int>(static_cast<std::size_t>(ranks), blocks.size() / ranks));
}

// Survivors geometric in depth, the same in every step.
cost::ModelCost exits(double survivors, int blocks) {
  EarlyExitOptions p;
  p.survivors = survivors;
  p.exit_every = 1;
  p.exit_spread = p.drift = 0;
  p.warm_up = 0;
  p.ramp_steps = 1;
  LoadInputs inputs = products(blocks);
  inputs.micro_batches = 1'000'000'000;
  return whole_blocks((*make_early_exit(p, inputs))->at(1000), Ends::kLeftOut);
}

// Tolerances: among cuts with the same bottleneck ours is the one with the least sum of squares,
// which makes the fill and drain shorter than the table's by up to 2 %.
TEST(Gains, EarlyExit) {
  const std::array<double, 5> ten = {1.57, 1.58, 1.67, 1.76, 1.67};
  const std::array<double, 5> three = {1.92, 2.22, 2.02, 2.28, 2.28};
  for (std::size_t i = 0; i < kPipelines.size(); ++i) {
    const auto [blocks, ranks] = kPipelines[i];
    EXPECT_NEAR(gain_of(exits(0.1, blocks), ranks).speed_up, ten[i], 0.025)
        << blocks << "/" << ranks;
    EXPECT_NEAR(gain_of(exits(0.03, blocks), ranks).speed_up, three[i], 0.03)
        << blocks << "/" << ranks;
  }
  const Gain gain = gain_of(exits(0.1, 48), 8);  // 57 -> 24 %
  EXPECT_NEAR(gain.bubble_before, 0.57, 0.01);
  EXPECT_NEAR(gain.bubble_after, 0.24, 0.015);
}

TEST(Gains, FrozenPrefix) {
  const std::array<double, 5> half = {1.39, 1.40, 1.27, 1.40, 1.40};
  const std::array<double, 5> three_quarters = {1.79, 1.42, 1.79, 1.79, 1.42};
  for (std::size_t i = 0; i < kPipelines.size(); ++i) {
    const auto [blocks, ranks] = kPipelines[i];
    const auto all = whole_blocks(dense(products(blocks)), Ends::kLeftOut);
    EXPECT_NEAR(gain_of(freeze_prefix(all, blocks / 2), ranks).speed_up, half[i], 0.02)
        << blocks << "/" << ranks;
    EXPECT_NEAR(gain_of(freeze_prefix(all, blocks * 3 / 4), ranks).speed_up, three_quarters[i],
                0.02)
        << blocks << "/" << ranks;
  }
}

// The table's rows of 1.00: what is frozen anywhere passes gradients on, and with an even number of
// blocks a stage routed and full blocks even out.
TEST(Gains, RandomFreezingAndMixtureOfDepthsHaveNone) {
  FreezingOptions random;
  random.rule = FreezingRule::kRandom;
  random.max_fraction = 0.5;
  MixtureOfDepthsOptions routed;
  routed.noise = 0;
  for (const auto& [blocks, ranks] : kPipelines) {
    const LoadInputs inputs = products(blocks);
    const auto frozen = (*make_freezing(random, inputs))->at(9999);
    const auto depths = (*make_mixture_of_depths(routed, inputs))->at(0);
    if (blocks / ranks % 2 == 0) {
      EXPECT_NEAR(gain_of(whole_blocks(depths, Ends::kLeftOut), ranks).speed_up, 1, 0.005)
          << blocks << "/" << ranks;
    }
    EXPECT_NEAR(gain_of(whole_blocks(frozen, Ends::kLeftOut), ranks).speed_up, 1, 0.1)
        << blocks << "/" << ranks;
  }
}

// The table has 1.00 to 1.03 for MoE, and 1.04 to 1.14 for pruning with costs drawn layer by layer:
// ours follow the depth too, which leaves more to balance.
TEST(Gains, ExpertsAndPruningHaveLittle) {
  double experts = 0;
  double pruned = 0;
  int count = 0;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    for (const auto& [blocks, ranks] : kPipelines) {
      LoadInputs inputs = products(blocks);
      inputs.seed = seed;
      const auto thin = (*make_pruning({}, inputs))->at(8000);
      inputs.shape.experts = 8;
      inputs.shape.experts_per_token = 2;
      const auto mixed = (*make_moe({}, inputs))->at(8000);
      experts += gain_of(whole_blocks(mixed, Ends::kLeftOut), ranks).speed_up;
      pruned += gain_of(whole_blocks(thin, Ends::kLeftOut), ranks).speed_up;
      ++count;
    }
  }
  EXPECT_GE(experts / count, 0.999);
  EXPECT_LT(experts / count, 1.03);
  EXPECT_GT(pruned / count, 1.1);
  EXPECT_LT(pruned / count, 1.3);
}

// A head of 50304 words is worth 4.1 blocks of hidden size 1024, and the even cut puts it on top of
// the last stage.
TEST(Gains, AHeadAloneUnbalancesTheEvenCut) {
  const std::array<double, 5> expected = {1.33, 1.60, 1.51, 1.36, 1.61};
  for (std::size_t i = 0; i < kPipelines.size(); ++i) {
    const auto [blocks, ranks] = kPipelines[i];
    LoadInputs inputs = products(blocks);
    inputs.shape.vocabulary = 50'304;
    const auto model = whole_blocks(dense(inputs), Ends::kKept);
    std::vector<int> even(static_cast<std::size_t>(ranks), blocks / ranks);
    ++even.back();
    const Gain gain = gain_of(model, ranks, even);
    EXPECT_NEAR(gain.speed_up, expected[i], 0.02) << blocks << "/" << ranks;
  }
}

}  // namespace
}  // namespace dynmo::dynamism
