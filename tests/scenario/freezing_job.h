// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>

#include "dynmo/dynamism/freezing/schedule.h"
#include "dynmo/scenario/run.h"

namespace dynmo::scenario {

inline constexpr double kUnlimited = std::numeric_limits<double>::infinity();

// Equal layers of 1 ms each in F, I and W; from `from` on the first `count` are frozen.
class FreezingLoad final : public dynamism::LoadModel {
 public:
  FreezingLoad(int layers, std::int64_t from, int count)
      : layers_(layers), from_(from), count_(count) {}
  cost::ModelCost at(std::int64_t step) const override {
    cost::ModelCost model;
    for (int i = 0; i < layers_; ++i) {
      model.layers.push_back({.name = "layer",
                              .forward_s = 1e-3,
                              .backward_input_s = 1e-3,
                              .backward_weight_s = 1e-3,
                              .parameter_bytes = Bytes{1000},
                              .gradient_bytes = Bytes{2000},
                              .optimizer_bytes = Bytes{3000},
                              .copy_bytes = Bytes{},
                              .activation_bytes = Bytes{1},
                              .boundary_bytes = Bytes{0}});
    }
    return step < from_ ? model : dynamism::freeze_prefix(model, count_);
  }
  cost::Announced announced_at(std::int64_t step) const override {
    return step == from_ ? cost::Announced::kKnown : cost::Announced::kNothing;
  }

 private:
  int layers_;
  std::int64_t from_;
  int count_;
};

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

struct JobOptions {
  int layers = 8;
  std::int64_t frozen_from = kNever;
  int frozen = 0;
};

// 4 ranks, 8 micro-batches, 20 steps; links, measuring, planning and moving cost nothing.
inline Scenario free_scenario() {
  Scenario s;
  s.cluster.pipeline_ranks = 4;
  s.training.steps = 20;
  s.training.micro_batches = 8;
  s.policy.profile_share = s.policy.plan_s = s.policy.move_fixed_s = 0;
  s.policy.move_bandwidth = 1e18;
  return s;
}

inline Job job_of(const Scenario& scenario, const JobOptions& options = {}) {
  Job job;
  job.scenario = scenario;
  job.device.name = "plain";
  job.device.memory = cost::kUnlimitedMemory;
  job.device.inside_node =
      job.device.between_nodes = {.latency_s = 0, .bandwidth_bytes_per_s = kUnlimited};
  job.load = std::make_unique<FreezingLoad>(options.layers, options.frozen_from, options.frozen);
  job.dense = std::make_unique<FreezingLoad>(options.layers, kNever, 0);
  job.tokens_per_micro_batch = 100;
  return job;
}

inline RunResult result_of(const Job& job, const std::string& policy) {
  const Policy parsed = parse_policy(policy).value();
  const auto result = run(job, *job.load, parsed);
  EXPECT_TRUE(result.has_value()) << policy << ": " << result.error().message;
  return result.has_value() ? *result : RunResult{};
}

}  // namespace dynmo::scenario
