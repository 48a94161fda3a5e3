// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/profiler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <utility>

#include "dynmo/core/median.h"
#include "dynmo/core/rng.h"

namespace dynmo::control {
namespace {

constexpr int kWindow = 5;
constexpr int kLongest = 8 * kWindow;

cost::ModelCost named(int layers) {
  cost::ModelCost model;
  model.layers.resize(static_cast<std::size_t>(layers));
  for (int i = 0; i < layers; ++i) {
    model.layers[static_cast<std::size_t>(i)].name = fmt::format("layer{}", i);
  }
  return model;
}

// Steps of layers on ranks, each time with noise of the layer, of its rank and of the step.
struct Machine {
  std::vector<double> forward_s;
  std::vector<Rank> owners;
  double weight_gradient = 3;  // times forward; of the first layer always 3
  bool weight_gradients_of_all = true;
  double layer_noise = 0;
  double rank_noise = 0;
  double step_noise = 0;
  int frozen = 0;  // layers that run forward only
  std::uint64_t seed = 1;
  Rng rng{seed};
  int found = 0;  // changes

  void run(Profiler& profiler, int steps) {
    for (int step = 0; step < steps; ++step) {
      const double of_step = std::exp(step_noise * rng.normal());
      std::map<Rank, double> of_rank;
      for (const Rank rank : owners) of_rank.try_emplace(rank, 1 + rank_noise * rng.normal());
      std::vector<cost::LayerSample> layers;
      for (std::size_t i = 0; i < forward_s.size(); ++i) {
        const double time =
            forward_s[i] * of_step * of_rank[owners[i]] * (1 + layer_noise * rng.normal());
        cost::LayerSample& layer = layers.emplace_back();
        layer.time = {
            .forward_s = time,
            .input_gradient_s = 2 * time,
            .weight_gradient_s = (i == 0 && !weight_gradients_of_all ? 3 : weight_gradient) * time};
        layer.update_s = 4 * time;
        if (std::cmp_greater_equal(i, frozen)) continue;
        layer.time = {.forward_s = time};
        layer.update_s = 0;
      }
      if (profiler.add(layers, owners, {}, frozen)) ++found;
    }
  }
};

std::vector<Rank> ranks(const std::vector<int>& numbers) {
  std::vector<Rank> result;
  for (const int number : numbers) result.emplace_back(number);
  return result;
}

TEST(Profiler, GivesWhatItWasGivenWhereNothingChanges) {
  Profiler profiler(named(3), kWindow);
  EXPECT_FALSE(profiler.costs(0));
  Machine machine{.forward_s = {1, 2, 5}, .owners = ranks({0, 0, 1})};
  machine.run(profiler, 100);
  EXPECT_EQ(profiler.steps(), kLongest);
  const auto costs = profiler.costs(1);
  for (std::size_t i = 0; i < 3; ++i) {
    const cost::LayerCost& layer = costs->layers[i];
    const double trained = i == 0 ? 0 : machine.forward_s[i];
    EXPECT_NEAR(layer.forward_s, machine.forward_s[i], 1e-12);
    EXPECT_NEAR(layer.backward_input_s, 2 * trained, 1e-12);
    EXPECT_NEAR(layer.backward_weight_s, 3 * trained, 1e-12);
    EXPECT_NEAR(layer.update_s, 4 * trained, 1e-12);
  }
  EXPECT_NEAR(profiler.relative_noise(), 0, 1e-12);
  EXPECT_NEAR(profiler.rank_noise(), 0, 1e-12);
  profiler.restart();
  EXPECT_EQ(profiler.steps(), kLongest);
  machine.forward_s = {3, 1, 1};
  machine.run(profiler, 1);
  EXPECT_EQ(profiler.steps(), 1);
  EXPECT_NEAR(profiler.costs(0)->layers[0].forward_s, 3, 1e-12);
  profiler.forget_times();
  EXPECT_FALSE(profiler.costs(0));
}

// Layers whose three parts are products of equal time beside something else, which pruning leaves.
TEST(Profiler, PrunedLayersCostWhatTheirProductsNowTake) {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Rng rng(seed);
    cost::ModelCost known = named(6);
    std::vector<double> products;
    std::vector<double> overhead;
    for (cost::LayerCost& layer : known.layers) {
      products.push_back(1e-3 * (0.1 + rng.uniform()));
      overhead.push_back(1e-3 * rng.uniform());
      layer.gradient_bytes = Bytes{1000};
      layer.product_time = 0.2 + 0.8 * rng.uniform();
    }
    const auto truth = [&] {
      std::vector<cost::LayerSample> layers;
      for (std::size_t i = 0; i < known.layers.size(); ++i) {
        const double product = products[i] * known.layers[i].product_time;
        layers.push_back(
            {.time = {.forward_s = product + overhead[i],
                      .input_gradient_s = product + 2 * overhead[i],
                      .weight_gradient_s = product},
             .update_s = 1e-6 * static_cast<double>(known.layers[i].gradient_bytes.value),
             .stash_bytes = {}});
      }
      return layers;
    };
    const std::vector<Rank> owners(6, Rank(0));
    Profiler profiler(known, kWindow);
    for (int step = 0; step < 3; ++step) profiler.add(truth(), owners);
    const int pruned = 1 + static_cast<int>(seed % 5);
    for (int i = 0; i < pruned; ++i) {
      cost::LayerCost& layer = known.layers[static_cast<std::size_t>(i)];
      layer.product_time *= rng.uniform();
      layer.gradient_bytes = Bytes{500};
    }
    profiler.know(known);
    const auto layers = truth();
    const cost::ModelCost costs = *profiler.costs(profiler.known());
    for (std::size_t i = 0; i < layers.size(); ++i) {
      ASSERT_NEAR(costs.layers[i].forward_s, layers[i].time.forward_s, 1e-12) << "seed " << seed;
      ASSERT_NEAR(costs.layers[i].backward_input_s, layers[i].time.input_gradient_s, 1e-12)
          << "seed " << seed;
      ASSERT_NEAR(costs.layers[i].backward_weight_s, layers[i].time.weight_gradient_s, 1e-12)
          << "seed " << seed;
      ASSERT_NEAR(costs.layers[i].update_s, layers[i].update_s, 1e-12) << "seed " << seed;
    }
    // Then they are measured: nothing is left of the prediction.
    for (double& time : products) time *= 2;
    profiler.add(truth(), owners);
    EXPECT_EQ(profiler.steps(), 1) << "seed " << seed;
    EXPECT_NEAR(profiler.costs(profiler.known())->layers[0].backward_weight_s,
                truth()[0].time.weight_gradient_s, 1e-12)
        << "seed " << seed;
  }
}

TEST(Profiler, OneLayerThatChangesIsSeenInFourStepsAndTheWindowStaysLong) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Profiler profiler(named(4), kWindow);
    Machine machine{.forward_s = {1, 1, 1, 1},
                    .owners = ranks({0, 0, 1, 1}),
                    .layer_noise = 0.01,
                    .rank_noise = 0.01,
                    .step_noise = 0.1,
                    .seed = seed};
    machine.run(profiler, kLongest);
    machine.forward_s[2] = 0.5;  // pruned
    machine.run(profiler, 4);
    EXPECT_EQ(profiler.steps(), kLongest) << "seed " << seed;
    const auto costs = profiler.costs(0);
    EXPECT_NEAR(costs->layers[2].forward_s / costs->layers[1].forward_s, 0.5, 0.05)
        << "seed " << seed;
  }
}

TEST(Profiler, ABackwardThatChangesAloneIsSeenToo) {
  Profiler profiler(named(2), kWindow);
  Machine machine{.forward_s = {1, 1}, .owners = ranks({0, 1}), .layer_noise = 0.01};
  machine.run(profiler, kLongest);
  machine.weight_gradient = 0;
  machine.weight_gradients_of_all = false;
  machine.run(profiler, 4);
  EXPECT_EQ(profiler.steps(), kLongest);
  EXPECT_EQ(profiler.costs(0)->layers[1].backward_weight_s, 0);
  EXPECT_GT(profiler.costs(0)->layers[0].backward_weight_s, 0);
}

// The whole machine slower: the newest steps say how long, all steps in what shares.
// What is noisy is the time of a unit of work, over the whole window.
TEST(Profiler, CountedWorkChangesCostsInOneStep) {
  Profiler profiler(named(4), kWindow);
  Rng rng(11);
  const std::vector<Rank> owners = {Rank(0), Rank(0), Rank(1), Rank(1)};
  const auto step = [&](double work) {
    std::vector<cost::LayerSample> layers(4);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const double own = i == 3 ? work : 1;
      const double time = own * (1 + 0.05 * rng.normal());
      layers[i].time = {.forward_s = time, .input_gradient_s = time, .weight_gradient_s = time};
      layers[i].work = 100 * own;
    }
    profiler.add(layers, owners);
  };
  for (int i = 0; i < kLongest; ++i) step(1);
  const double noise = profiler.relative_noise();
  EXPECT_NEAR(profiler.work_noise(), 0, 1e-12);
  double work = 1;
  for (int i = 0; i < 10; ++i) step(work *= 0.8);
  const cost::ModelCost costs = *profiler.costs(named(4));
  EXPECT_NEAR(costs.layers[3].forward_s / costs.layers[2].forward_s, work, 0.1 * work);
  EXPECT_EQ(profiler.steps(), kLongest);
  EXPECT_NEAR(profiler.relative_noise(), noise, 0.5 * noise) << "a count that changes is no noise";
  for (int i = 0; i < kLongest; ++i) step(i % 2 == 0 ? work : 1.2 * work);
  EXPECT_NEAR(profiler.work_noise(), 0.2 / 4, 0.02) << "of four layers one";
}

TEST(Profiler, AMachineThatIsSlowerChangesNoShare) {
  Profiler profiler(named(2), kWindow);
  Machine machine{.forward_s = {1, 3}, .owners = ranks({0, 1})};
  machine.run(profiler, kLongest);
  machine.forward_s = {2, 6};
  machine.run(profiler, kWindow);
  EXPECT_EQ(profiler.steps(), kLongest);
  EXPECT_NEAR(profiler.costs(0)->layers[0].forward_s, 2, 1e-12);
  EXPECT_NEAR(profiler.costs(0)->layers[1].forward_s, 6, 1e-12);
}

TEST(Profiler, NoiseAloneKeepsTheWindowLong) {
  std::int64_t steps = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Profiler profiler(named(12), kWindow);
    Machine machine{.forward_s = std::vector<double>(12, 1.0),
                    .owners = ranks({0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1}),
                    .layer_noise = 0.02,
                    .rank_noise = 0.1,
                    .step_noise = 0.2,
                    .seed = seed};
    machine.run(profiler, 2 * kLongest);
    for (int step = 0; step < 100; ++step) {
      machine.run(profiler, 1);
      steps += profiler.steps();
    }
  }
  EXPECT_GT(steps / 2000, kLongest * 3 / 4);
}

// The noise of one step's costs, shrunk as a median's over the window.
TEST(Profiler, TellsNoiseOfRanksFromThatOfLayers) {
  const double shrunk = 1.2533 / std::sqrt(kLongest);
  for (const double of_ranks : {0.0, 0.1}) {
    std::vector<double> layer;
    std::vector<double> rank;
    for (std::uint64_t seed = 1; seed <= 25; ++seed) {
      Profiler profiler(named(60), kWindow);
      Machine machine{.forward_s = std::vector<double>(60, 1.0),
                      .owners = std::vector<Rank>(30, Rank(0)),
                      .layer_noise = 0.02,
                      .rank_noise = of_ranks,
                      .step_noise = 0.2,
                      .seed = seed};
      machine.owners.resize(60, Rank(1));
      machine.run(profiler, 2 * kLongest);
      if (profiler.steps() < kLongest) continue;
      layer.push_back(profiler.relative_noise() / shrunk);
      rank.push_back(profiler.rank_noise() / shrunk);
    }
    ASSERT_GT(rank.size(), 15U);
    // A rank's sum of 30 layers keeps a share of their own noise.
    const double own = 0.02 / std::sqrt(30.0);
    EXPECT_NEAR(median(rank), std::hypot(of_ranks, own), 0.15 * std::hypot(of_ranks, own));
    EXPECT_NEAR(median(layer), 0.02, 0.002);
  }
}

TEST(Profiler, OneRankHasNoNoiseOfRanks) {
  Profiler profiler(named(2), kWindow);
  Machine machine{.forward_s = {1, 3}, .owners = ranks({0, 0}), .rank_noise = 0.1};
  machine.run(profiler, kLongest);
  EXPECT_EQ(profiler.rank_noise(), 0);
}

// The window has long forgotten the steps in which the layers trained.
TEST(Profiler, LayersThatTrainAgainCostWhatTheyLastDid) {
  for (const int frozen_steps : {1, 3, 3 * kLongest}) {
    Profiler profiler(named(4), kWindow);
    Machine machine{.forward_s = {1, 2, 5, 3},
                    .owners = ranks({0, 0, 1, 1}),
                    .layer_noise = 0.005,
                    .rank_noise = 0.005};
    machine.run(profiler, kLongest);
    machine.frozen = 1;
    machine.run(profiler, frozen_steps);
    machine.frozen = 3;
    machine.run(profiler, frozen_steps);
    EXPECT_EQ(profiler.costs(3)->layers[2].backward_weight_s, 0);
    const auto expect_trained = [&](const char* when) {
      const auto costs = profiler.costs(0);
      for (std::size_t i = 0; i < 4; ++i) {
        const cost::LayerCost& layer = costs->layers[i];
        const double forward = machine.forward_s[i];
        EXPECT_NEAR(layer.backward_input_s, 2 * forward, 0.05 * forward) << i << when;
        EXPECT_NEAR(layer.backward_weight_s, 3 * forward, 0.05 * forward) << i << when;
        EXPECT_NEAR(layer.update_s, 4 * forward, 0.05 * forward) << i << when;
      }
    };
    expect_trained(" before the first step");
    machine.frozen = 0;
    machine.run(profiler, 1);
    expect_trained(" after it");
    machine.run(profiler, kLongest);
    expect_trained(" after many");
    EXPECT_EQ(machine.found, 0) << "to train again is no change that has to be found";
  }
}

// A run that was resumed while they were frozen. The first layer has no input gradient.
TEST(Profiler, LayersThatHaveNotTrainedCostWhatOthersDoUntilMeasured) {
  Profiler profiler(named(3), kWindow);
  Machine machine{.forward_s = {1, 2, 5}, .owners = ranks({0, 0, 1}), .frozen = 2};
  machine.run(profiler, kLongest);
  const auto costs = profiler.costs(0);
  EXPECT_EQ(costs->layers[0].backward_input_s, 0);
  EXPECT_NEAR(costs->layers[0].backward_weight_s, 3, 1e-12);
  EXPECT_NEAR(costs->layers[1].backward_input_s, 4, 1e-12);
  EXPECT_NEAR(costs->layers[1].backward_weight_s, 6, 1e-12);
  EXPECT_NEAR(costs->layers[1].update_s, 8, 1e-12);
}

}  // namespace
}  // namespace dynmo::control
