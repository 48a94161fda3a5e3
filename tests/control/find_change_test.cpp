// SPDX-License-Identifier: Apache-2.0
#include "dynmo/control/find_change.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "dynmo/core/rng.h"
#include "tests/support/samples.h"

namespace dynmo::control {
namespace {

constexpr int kOfRank = 6;  // layers
constexpr double kRelevant = 0.01;

// Layers of unlike times, a quarter of them on each rank.
struct Ranks {
  explicit Ranks(std::uint64_t drawn_from) : seed(drawn_from), rng(drawn_from) {
    for (int i = 0; i < 4 * kOfRank; ++i) {
      seconds.push_back(0.5 + rng.uniform());
      owners.emplace_back(i / kOfRank);
    }
  }
  LayerTimes step() {
    LayerTimes times{.seconds = seconds, .owners = owners};
    const double of_step = std::exp(0.3 * rng.normal());
    for (int r = 0; r < 4; ++r) {
      const double of_rank = of_step * std::exp(noise.rank * rng.normal());
      for (int i = r * kOfRank; i < (r + 1) * kOfRank; ++i) {
        times.seconds[static_cast<std::size_t>(i)] *= of_rank * std::exp(noise.own * rng.normal());
      }
    }
    return times;
  }
  void run(std::deque<LayerTimes>& steps, int count) {
    for (int i = 0; i < count; ++i) {
      steps.push_back(step());
      if (steps.size() > 40) steps.pop_front();
    }
  }

  std::uint64_t seed;
  Rng rng;
  std::vector<double> seconds;
  std::vector<Rank> owners;
  StepNoise noise = {.own = 0.02, .rank = 0.05};
};

// As the profiler does: what was found is where the window begins.
int false_alarms(Ranks& machine, int count) {
  std::deque<LayerTimes> steps;
  int alarms = 0;
  for (int i = 0; i < count; ++i) {
    machine.run(steps, 1);
    const auto found = find_change(steps, machine.noise, kRelevant);
    if (!found) continue;
    ++alarms;
    while (std::ssize(steps) > found->steps) steps.pop_front();
  }
  return alarms;
}

TEST(FindChange, NoiseIsNoChange) {
  int alarms = 0;
  for (std::uint64_t seed = 1; seed <= samples(20U); ++seed) {
    Ranks machine(seed);
    alarms += false_alarms(machine, 500);
  }
  EXPECT_LE(alarms, samples(5)) << "of " << samples(10000) << " steps";
}

TEST(FindChange, NothingIsFoundInWhatIsTheSame) {
  Ranks machine(1);
  machine.noise = {};
  EXPECT_EQ(false_alarms(machine, 100), 0);
}

TEST(FindChange, ALayerThatIsCheaperIsFoundAfterThreeSteps) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    Ranks machine(seed);
    std::deque<LayerTimes> steps;
    machine.run(steps, 30);
    machine.seconds[7] *= 0.5;
    int after = 0;
    std::optional<FoundChange> found;
    while (!found && after < 10) {
      machine.run(steps, 1);
      ++after;
      found = find_change(steps, machine.noise, kRelevant);
    }
    ASSERT_TRUE(found) << "seed " << seed;
    EXPECT_LE(after, 4) << "seed " << seed;
    ASSERT_TRUE(found->layer) << "seed " << seed;
    EXPECT_EQ(*found->layer, LayerId(7)) << "seed " << seed;
    EXPECT_NEAR(found->factor, 0.5, 0.08) << "seed " << seed;
    EXPECT_LE(found->steps, after) << "seed " << seed;
  }
}

TEST(FindChange, ARankThatStaysSlowIsFoundAndABurstIsNot) {
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    for (const bool burst : {true, false}) {
      Ranks machine(seed);
      std::deque<LayerTimes> steps;
      machine.run(steps, 30);
      for (int i = 0; i < kOfRank; ++i) machine.seconds[static_cast<std::size_t>(i)] *= 2;
      std::optional<FoundChange> found;
      int after = 0;
      while (!found && after < 12) {
        if (burst && after == 3) {
          for (int i = 0; i < kOfRank; ++i) machine.seconds[static_cast<std::size_t>(i)] /= 2;
        }
        machine.run(steps, 1);
        ++after;
        found = find_change(steps, machine.noise, kRelevant);
      }
      EXPECT_EQ(found.has_value(), !burst) << "seed " << seed << " burst " << burst;
      if (!found) continue;
      ASSERT_TRUE(found->rank) << "seed " << seed;
      EXPECT_EQ(*found->rank, Rank(0)) << "seed " << seed;
      EXPECT_NEAR(found->factor, 2, 0.3) << "seed " << seed;
      EXPECT_EQ(after, 4) << "seed " << seed;
    }
  }
}

// Layers that move to another rank take as long as before.
TEST(FindChange, AMoveIsNoChange) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Ranks machine(seed);
    std::deque<LayerTimes> steps;
    machine.run(steps, 20);
    for (int i = 4; i < kOfRank; ++i) machine.owners[static_cast<std::size_t>(i)] = Rank(1);
    machine.run(steps, 6);
    EXPECT_FALSE(find_change(steps, machine.noise, kRelevant)) << "seed " << seed;
  }
}

TEST(FindChange, WhatDoesNotMatterIsNoChange) {
  Ranks machine(3);
  machine.noise = {};
  std::deque<LayerTimes> steps;
  machine.run(steps, 20);
  machine.seconds[7] *= 1.01;  // of a sixth of a rank
  machine.run(steps, 6);
  EXPECT_FALSE(find_change(steps, machine.noise, kRelevant));
  EXPECT_TRUE(find_change(steps, machine.noise, 1e-4));
}

}  // namespace
}  // namespace dynmo::control
