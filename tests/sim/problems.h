// SPDX-License-Identifier: Apache-2.0
#pragma once

// Costs, clusters and random problems for the tests of the simulator.

#include <vector>

#include "dynmo/cost/cluster.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/simulate.h"
#include "tests/schedule/random_pipelines.h"

namespace dynmo::sim::testing {

using cost::Cluster;
using schedule::PipelineShape;
using schedule::Schedule;
using schedule::ScheduleKind;
using schedule::testing::even_shape;
using schedule::testing::pick;

inline Cluster cluster_of(int ranks) {
  return {.ranks = std::vector<cost::ClusterRank>(static_cast<std::size_t>(ranks)),
          .inside_node = {},
          .between_nodes = {}};
}

inline std::vector<StageCost> equal_costs(int stages, std::int64_t forward,
                                          std::int64_t input_gradient,
                                          std::int64_t weight_gradient) {
  const StageCost cost{.forward = Nanoseconds{forward},
                       .input_gradient = Nanoseconds{input_gradient},
                       .weight_gradient = Nanoseconds{weight_gradient},
                       .update = {},
                       .state = {},
                       .activation = Bytes{1},
                       .boundary = {}};
  return std::vector<StageCost>(static_cast<std::size_t>(stages), cost);
}

inline Schedule lowered(ScheduleKind kind, const PipelineShape& shape) {
  return lower(*make_schedule(kind, shape));
}

struct Problem {
  Schedule schedule;
  std::vector<StageCost> costs;
  Cluster cluster;
};

inline Problem random_problem(Rng& rng, bool crowded) {
  const PipelineShape shape =
      crowded ? schedule::testing::random_crowded_shape(rng) : schedule::testing::random_shape(rng);
  const auto kind = pick(rng, 0, 1) == 0 ? ScheduleKind::kGpipe : ScheduleKind::k1F1B;
  Problem problem{.schedule = crowded ? lower(schedule::testing::random_schedule(rng, shape))
                                      : lowered(kind, shape),
                  .costs = {},
                  .cluster = cluster_of(shape.ranks)};
  const auto time = [&] { return Nanoseconds{pick(rng, 0, 3) == 0 ? 0 : pick(rng, 0, 100'000)}; };
  for (std::size_t s = 0; s < shape.stages.size(); ++s) {
    problem.costs.push_back({.forward = time(),
                             .input_gradient = time(),
                             .weight_gradient = time(),
                             .update = time(),
                             .reduction = time(),
                             .state = Bytes{pick(rng, 0, 1000)},
                             .activation = Bytes{pick(rng, 0, 1000)},
                             .boundary = Bytes{pick(rng, 0, 100'000)}});
  }
  for (cost::ClusterRank& rank : problem.cluster.ranks) {
    rank.speed = pick(rng, 0, 1) == 0 ? 1 : 0.25 + 2 * rng.uniform();
    rank.node = pick(rng, 0, 1);
  }
  if (pick(rng, 0, 3) > 0) {
    problem.cluster.inside_node = {.latency_s = 1e-6 * rng.uniform(),
                                   .bandwidth_bytes_per_s = 1e10};
    problem.cluster.between_nodes = {.latency_s = 5e-5 * rng.uniform(),
                                     .bandwidth_bytes_per_s = 1e9 + 1e9 * rng.uniform()};
  }
  return problem;
}

}  // namespace dynmo::sim::testing
