// SPDX-License-Identifier: Apache-2.0
// Plans a pipeline and simulates a step with dynmo::core alone, without libtorch. Build it against
// an installed DynMo: `c++ -std=c++20 plan.cpp $(pkg-config --cflags --libs dynmo-core)`, or
// find_package(dynmo COMPONENTS core) in CMake.
#include <fmt/format.h>

#include <cstdio>

#include "dynmo/plan/propose.h"

using namespace dynmo;

int main() {
  // Twenty-four equal layers; the first twelve are frozen and run forward only.
  cost::ModelCost model;
  for (int i = 0; i < 24; ++i) {
    model.layers.push_back({.name = fmt::format("layers.{}", i),
                            .forward_s = 1e-3,
                            .backward_input_s = 1e-3,
                            .backward_weight_s = 1e-3,
                            .parameter_bytes = Bytes{64 << 20},
                            .activation_bytes = Bytes{16 << 20},
                            .boundary_bytes = Bytes{4 << 20},
                            .frozen = i < 12});
  }
  // Four ranks of 80 GiB; a message takes 5 us, and 100 GB pass in a second.
  cost::Cluster cluster = cost::equal_ranks(4, Bytes{80LL << 30});
  cluster.inside_node = {.latency_s = 5e-6, .bandwidth_bytes_per_s = 100e9};

  const plan::BalanceProblem problem{{model, cluster, 16}};
  for (const auto balancer : {plan::Balancer::kUniform, plan::Balancer::kOptimal}) {
    const Expected<plan::Proposal> made = plan::propose(balancer, problem);
    if (!made) {
      fmt::print(stderr, "plan: {}\n", made.error().message);
      return exit_code(made.error().code);
    }
    fmt::print("{:8} {:10} step {:5.1f} ms, bubble {:4.1f} %\n", plan::name(balancer),
               plan::to_string(made->plan), 1e3 * made->evaluation.step_time_s,
               100 * made->evaluation.result.bubble);
  }
}
