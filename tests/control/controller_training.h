// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "dynmo/control/controller.h"
#include "dynmo/core/rng.h"
#include "dynmo/plan/evaluate.h"

namespace dynmo::control::testing {

inline constexpr int kMicroBatches = 8;

inline cost::ModelCost equal_layers(int count) {
  cost::ModelCost model;
  for (int i = 0; i < count; ++i) {
    cost::LayerCost& layer = model.layers.emplace_back();
    layer.name = fmt::format("layer{}", i);
    layer.forward_s = layer.backward_input_s = layer.backward_weight_s = 1e-3;
    layer.parameter_bytes = Bytes{1000};
    layer.optimizer_bytes = Bytes{2000};
  }
  return model;
}

// A training of equal layers on 4 ranks, whose layers change as a test says.
struct Training {
  explicit Training(std::uint64_t noise_seed = 1) : rng(noise_seed) {}

  void scale(int first, int count, double factor) {
    for (int i = first; i < first + count; ++i) {
      cost::LayerCost& layer = costs.layers[static_cast<std::size_t>(i)];
      layer.forward_s *= factor;
      layer.backward_input_s *= factor;
      layer.backward_weight_s *= factor;
    }
  }

  std::optional<Decision> decide() {
    auto decision =
        controller.decide({.plan = plan, .step = step, .known = costs, .cluster = cluster});
    EXPECT_TRUE(decision) << decision.error().message;
    if (*decision) ++plans;
    if (*decision && (*decision)->migrate) {
      plan = (*decision)->plan;
      moves.push_back(step);
    }
    return *decision;
  }

  cost::Cluster real_cluster() const {
    cost::Cluster real = cluster;
    if (slow) real.ranks[slow->index()].speed = speed;
    return real;
  }

  void observe() {
    cost::Observation seen{.layers = {}, .charges = charges};
    for (std::int32_t i = 0; i < costs.size(); ++i) {
      const cost::LayerCost& layer = costs.layers[LayerId(i).index()];
      const Rank owner = plan.owner(LayerId(i));
      const double rank = owner == burst ? 2 : 1 / (owner == slow ? speed : 1);
      const double factor = rank * std::max(0.1, 1 + noise * rng.normal());
      seen.layers.push_back(cost::sample_of(layer, factor));
      if (counted) seen.layers.back().work = layer.forward_s;
    }
    seen.steps = every;
    controller.observe(seen, plan, costs.frozen_layers());
    step_s = evaluate(plan, {costs, real_cluster(), kMicroBatches})->step_time_s;
    trained_s += step_s;
    step += every;
  }

  void run(std::int64_t steps) {
    for (std::int64_t i = 0; i < steps; ++i) {
      decide();
      observe();
    }
  }

  Rng rng;
  cost::ModelCost costs = equal_layers(16);
  cost::Cluster cluster = cost::equal_ranks(4);
  plan::Plan plan = plan::make_plan({4, 4, 4, 4}, schedule::ScheduleKind::k1F1B);
  cost::Charges charges = {.plan_s = 1e-4, .move_fixed_s = 1e-4, .bytes_per_s = 1e9};
  Controller controller{costs, {.micro_batches = kMicroBatches, .steps = 1000}};
  double noise = 0;
  bool counted = false;    // sources count the work
  std::int64_t every = 1;  // steps that an observation stands for
  std::optional<Rank> burst;
  std::optional<Rank> slow;  // of `speed`, which the controller is not told
  double speed = 1;
  std::int64_t step = 0;
  std::int64_t plans = 0;
  double step_s = 0;  // of the newest step
  double trained_s = 0;
  std::vector<std::int64_t> moves;
};

}  // namespace dynmo::control::testing
