// SPDX-License-Identifier: Apache-2.0
// Balancers on random chains: time to plan, and the bottleneck each cut leaves over the ideal.
#include <benchmark/benchmark.h>

#include <algorithm>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/evaluate.h"

namespace dynmo::plan {
namespace {

constexpr int kMicroBatches = 32;

// Layers of 0.5 to 1.5 ms for each of F, I and W.
cost::ModelCost random_model(int layers) {
  Rng rng(mix_key({17, static_cast<std::uint64_t>(layers)}));
  cost::ModelCost model{std::vector<cost::LayerCost>(static_cast<std::size_t>(layers))};
  for (cost::LayerCost& layer : model.layers) {
    layer.forward_s = layer.backward_input_s = layer.backward_weight_s =
        1e-3 * (0.5 + rng.uniform());
    layer.parameter_bytes = Bytes{1 << 20};
  }
  return model;
}

void balance_chain(benchmark::State& state, Balancer balancer) {
  const cost::ModelCost model = random_model(static_cast<int>(state.range(0)));
  const cost::Cluster cluster = cost::equal_ranks(static_cast<int>(state.range(1)));
  const BalanceProblem problem{model, cluster, kMicroBatches};
  std::vector<int> counts;
  for (auto _ : state) {
    counts = balance(balancer, problem).value();
    benchmark::DoNotOptimize(counts.data());
  }
  const auto times =
      rank_times_s(make_plan(counts, problem.schedule), model, cluster, kMicroBatches);
  double sum = 0;
  for (const double time : times) sum += time;
  const double slowest = *std::max_element(times.begin(), times.end());
  DYNMO_CHECK(slowest > 0 && counts.size() == times.size(), "one time a rank");
  state.counters["bottleneck/ideal"] = slowest * static_cast<double>(times.size()) / sum;
}

void shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->Args({32, 8})->Args({128, 16})->Args({1024, 64})->Unit(benchmark::kMicrosecond);
}

BENCHMARK_CAPTURE(balance_chain, uniform, Balancer::kUniform)->Apply(shapes);
BENCHMARK_CAPTURE(balance_chain, parameters, Balancer::kParameters)->Apply(shapes);
BENCHMARK_CAPTURE(balance_chain, optimal, Balancer::kOptimal)->Apply(shapes);

}  // namespace
}  // namespace dynmo::plan
