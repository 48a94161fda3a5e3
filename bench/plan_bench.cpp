// SPDX-License-Identifier: Apache-2.0
// Balancers on random chains: time to plan, and the bottleneck each cut leaves over the ideal.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/diffusion.h"
#include "dynmo/plan/evaluate.h"
#include "dynmo/plan/place.h"
#include "dynmo/plan/propose.h"
#include "dynmo/plan/traffic.h"
#include "tests/plan/baselines.h"

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
  const BalanceProblem problem{{model, cluster, kMicroBatches}};
  std::vector<int> counts;
  for (auto _ : state) {
    counts = balance(balancer, problem).value();
    benchmark::DoNotOptimize(counts.data());
  }
  const auto times =
      rank_times_s(make_plan(counts, problem.schedule), {model, cluster, kMicroBatches});
  double sum = 0;
  for (const double time : times) sum += time;
  const double slowest = *std::max_element(times.begin(), times.end());
  DYNMO_CHECK(slowest > 0 && counts.size() == times.size(), "one time a rank");
  state.counters["bottleneck/ideal"] = slowest * static_cast<double>(times.size()) / sum;
}

// Half blocks of two kinds, or of unlike ones.
cost::ModelCost half_blocks(int layers, bool unlike) {
  cost::ModelCost model = random_model(layers);
  for (std::size_t i = 0; i < model.layers.size(); ++i) {
    cost::LayerCost& layer = model.layers[i];
    if (!unlike)
      layer.forward_s = layer.backward_input_s = layer.backward_weight_s = i % 2 == 0 ? 6e-4 : 1e-3;
    layer.activation_bytes = Bytes{static_cast<std::int64_t>(layer.forward_s * 1.4e10)};
    layer.boundary_bytes = Bytes{1 << 20};
  }
  return model;
}

// `percent` of what the first rank of an even 1F1B cut saves.
cost::Cluster ranks_with(int ranks, const cost::ModelCost& model, int percent) {
  std::int64_t saved = 0;
  for (const cost::LayerCost& layer : model.layers) saved += layer.activation_bytes.value;
  return cost::equal_ranks(ranks, Bytes{saved * percent / 100});
}

void recomputing_chain(benchmark::State& state, bool unlike) {
  const cost::ModelCost model = half_blocks(static_cast<int>(state.range(0)), unlike);
  const auto ranks = static_cast<int>(state.range(1));
  const cost::Cluster cluster = ranks_with(ranks, model, 45);
  BalanceProblem problem{{model, cluster, kMicroBatches}};
  problem.recompute = Recompute::kAuto;
  std::vector<int> counts;
  for (auto _ : state) {
    counts = balance(Balancer::kOptimal, problem).value();
    benchmark::DoNotOptimize(counts.data());
  }
  const auto judged = judge(problem.recompute, make_plan(counts, problem.schedule),
                            {model, cluster, kMicroBatches});
  DYNMO_CHECK(judged && !judged->recomputed.empty(), "memory that asks for recomputation");
  double work = 0;
  for (const double layer : cost::layer_work_s(model, kMicroBatches)) work += layer;
  state.counters["bottleneck/ideal"] = judged->evaluation.bottleneck_s * ranks / work;
}

// A whole proposal, as a live decision asks for it, by percent of memory.
void recomputing_proposal(benchmark::State& state, bool unlike, schedule::ScheduleKind kind,
                          Balancer balancer) {
  const cost::ModelCost model = half_blocks(static_cast<int>(state.range(0)), unlike);
  const cost::Cluster cluster =
      ranks_with(static_cast<int>(state.range(1)), model, static_cast<int>(state.range(2)));
  BalanceProblem problem{{model, cluster, kMicroBatches}, kind};
  problem.recompute = Recompute::kAuto;
  Proposal proposal;
  for (auto _ : state) {
    proposal = propose(balancer, problem).value();
    benchmark::DoNotOptimize(proposal.plan.stages.data());
  }
  DYNMO_CHECK(!proposal.recomputed.empty() || state.range(2) >= 100,
              "memory that asks for recomputation");
  state.counters["step/ideal"] =
      proposal.evaluation.step_time_s / proposal.evaluation.ideal_step_time_s;
}

// The same for a search that came before (tests/plan/baselines.h).
template <typename Search>
void baseline_chain(benchmark::State& state, Search search) {
  const cost::ModelCost model = random_model(static_cast<int>(state.range(0)));
  const std::vector<double> work = cost::layer_work_s(model, kMicroBatches);
  const auto ranks = static_cast<int>(state.range(1));
  std::vector<int> counts;
  for (auto _ : state) {
    counts = search(work, ranks);
    benchmark::DoNotOptimize(counts.data());
  }
  const double sum = std::accumulate(work.begin(), work.end(), 0.0);
  state.counters["bottleneck/ideal"] = baseline::bottleneck(work, counts) * ranks / sum;
}

void diffusion(benchmark::State& state) {
  const cost::ModelCost model = random_model(static_cast<int>(state.range(0)));
  const auto ranks = static_cast<int>(state.range(1));
  const cost::Cluster cluster = cost::equal_ranks(ranks);
  std::vector<int> lopsided(static_cast<std::size_t>(ranks), 1);  // the farthest start there is
  lopsided.front() += model.size() - ranks;
  const Plan start = make_plan(lopsided, schedule::ScheduleKind::k1F1B);
  BalanceProblem problem{{model, cluster, kMicroBatches}};
  problem.current = &start;
  Diffusion result;
  for (auto _ : state) {
    result = diffuse(Balancer::kDiffusionTime, problem).value();
    benchmark::DoNotOptimize(result.counts.data());
  }
  const std::vector<double> work = cost::layer_work_s(model, kMicroBatches);
  const double sum = std::accumulate(work.begin(), work.end(), 0.0);
  state.counters["bottleneck/ideal"] = baseline::bottleneck(work, result.counts) * ranks / sum;
  state.counters["rounds"] = result.rounds;
  state.counters["bound"] = diffusion_bound(ranks, model.size());
}

enum class Shape { kRandom, kHeavyLayer, kHead };

// V placement, sums of the two stages of a rank over the ideal.
void v_placement(benchmark::State& state, Balancer balancer, Shape shape) {
  cost::ModelCost model = random_model(static_cast<int>(state.range(0)));
  if (shape == Shape::kHeavyLayer) model.layers[model.layers.size() / 2].forward_s = 0.05;
  if (shape == Shape::kHead) model.layers.back().forward_s = 0.01;
  const cost::Cluster cluster = cost::equal_ranks(static_cast<int>(state.range(1)));
  const BalanceProblem problem{{model, cluster, kMicroBatches}, schedule::ScheduleKind::kZbV};
  std::vector<int> counts;
  for (auto _ : state) {
    counts = balance(balancer, problem).value();
    benchmark::DoNotOptimize(counts.data());
  }
  const Plan plan =
      make_plan(counts, placement(balancer, problem), cluster.size(), problem.schedule);
  const auto times = rank_times_s(plan, {model, cluster, kMicroBatches});
  const double sum = std::accumulate(times.begin(), times.end(), 0.0);
  state.counters["bottleneck/ideal"] =
      *std::max_element(times.begin(), times.end()) * static_cast<double>(times.size()) / sum;
}

// One huge layer leaves the others no limit but the tie rule.
void heavy_layer(benchmark::State& state) {
  cost::ModelCost model = random_model(1024);
  model.layers[512].forward_s = 10;
  const cost::Cluster cluster = cost::equal_ranks(64);
  for (auto _ : state) {
    auto counts = balance(Balancer::kOptimal, {model, cluster, kMicroBatches}).value();
    benchmark::DoNotOptimize(counts.data());
  }
}

// Equal ranks on nodes of up to 8 in a random order: the time to place them, and the message time
// that is left over that of the given order.
void placing(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  cost::ModelCost model = random_model(2 * ranks);
  for (cost::LayerCost& layer : model.layers) layer.boundary_bytes = Bytes{1 << 20};
  const int of_node = std::min(8, ranks / 4);
  cost::Cluster cluster = cost::equal_nodes(ranks / of_node, of_node);
  Rng rng(mix_key({18, static_cast<std::uint64_t>(ranks)}));
  for (std::size_t r = cluster.ranks.size(); r-- > 1;) {
    std::swap(cluster.ranks[r], cluster.ranks[rng.below(r + 1)]);
  }
  cluster.between_nodes = {.latency_s = 1e-5, .bandwidth_bytes_per_s = 1e10};
  const Plan plan = make_plan(std::vector<int>(static_cast<std::size_t>(ranks), 2),
                              schedule::ScheduleKind::k1F1B);
  const BalanceProblem problem{{model, cluster, kMicroBatches}};
  Plan placed;
  for (auto _ : state) placed = place(plan, problem).value();
  const auto messages = [&](const Plan& one) {
    return message_time_s(traffic_of(one, model, kMicroBatches), cluster);
  };
  DYNMO_CHECK(messages(placed) <= messages(plan), "a better order than the given one");
  state.counters["messages/given"] = messages(placed) / messages(plan);
}

void shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->Args({32, 8})->Args({128, 16})->Args({1024, 64})->Unit(benchmark::kMicrosecond);
}

BENCHMARK_CAPTURE(balance_chain, uniform, Balancer::kUniform)->Apply(shapes);
BENCHMARK_CAPTURE(balance_chain, parameters, Balancer::kParameters)->Apply(shapes);
BENCHMARK_CAPTURE(balance_chain, optimal, Balancer::kOptimal)->Apply(shapes);
BENCHMARK(heavy_layer)->Unit(benchmark::kMicrosecond);
BENCHMARK(diffusion)->Apply(shapes);
BENCHMARK(placing)->Arg(8)->Arg(64)->Arg(256)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(recomputing_chain, two_kinds, false)->Args({64, 8})->Args({128, 16});
BENCHMARK_CAPTURE(recomputing_chain, unlike, true)->Args({64, 8})->Args({128, 16});
void proposal_shapes(benchmark::internal::Benchmark* benchmark) {
  for (const int percent : {25, 45, 85}) benchmark->Args({128, 16, percent});
  benchmark->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(recomputing_proposal, two_kinds, false, schedule::ScheduleKind::k1F1B,
                  Balancer::kOptimal)
    ->Apply(proposal_shapes);
BENCHMARK_CAPTURE(recomputing_proposal, unlike, true, schedule::ScheduleKind::k1F1B,
                  Balancer::kOptimal)
    ->Apply(proposal_shapes);
BENCHMARK_CAPTURE(recomputing_proposal, zb_h1, true, schedule::ScheduleKind::kZbH1,
                  Balancer::kOptimal)
    ->Apply(proposal_shapes);
BENCHMARK_CAPTURE(recomputing_proposal, zb_v, true, schedule::ScheduleKind::kZbV, Balancer::kVPair)
    ->Apply(proposal_shapes);
BENCHMARK_CAPTURE(recomputing_proposal, interleaved, true, schedule::ScheduleKind::kInterleaved,
                  Balancer::kOptimal)
    ->Apply(proposal_shapes);
BENCHMARK_CAPTURE(baseline_chain, deepspeed, baseline::deepspeed)
    ->Args({32, 8})
    ->Args({128, 16})
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(baseline_chain, original_dynmo, baseline::original_dynmo)->Apply(shapes);

void v_shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->Args({32, 8})->Args({128, 16})->Unit(benchmark::kMicrosecond);
}
BENCHMARK_CAPTURE(v_placement, uniform, Balancer::kUniform, Shape::kRandom)->Apply(v_shapes);
BENCHMARK_CAPTURE(v_placement, time, Balancer::kTime, Shape::kRandom)->Apply(v_shapes);
BENCHMARK_CAPTURE(v_placement, v_pair, Balancer::kVPair, Shape::kRandom)->Apply(v_shapes);
BENCHMARK_CAPTURE(v_placement, v_pair_head, Balancer::kVPair, Shape::kHead)->Apply(v_shapes);
BENCHMARK_CAPTURE(v_placement, v_pair_heavy_layer, Balancer::kVPair, Shape::kHeavyLayer)
    ->Apply(v_shapes);

}  // namespace
}  // namespace dynmo::plan
