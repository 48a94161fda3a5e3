// SPDX-License-Identifier: Apache-2.0
// The simulator: actions a second of a lowered 1F1B schedule, the check of the schedule included,
// beside the check alone.
#include <benchmark/benchmark.h>

#include <cmath>

#include "dynmo/core/check.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/simulate.h"

namespace dynmo::sim {
namespace {

schedule::Schedule pipeline(int ranks, int micro_batches) {
  schedule::PipelineShape shape{ranks, micro_batches, {}};
  for (int rank = 0; rank < ranks; ++rank) shape.stages.push_back({Rank(rank), false});
  return schedule::lower(schedule::make_schedule(schedule::ScheduleKind::k1F1B, shape).value());
}

std::int64_t actions(const schedule::Schedule& lowered) {
  std::int64_t sum = 0;
  for (const auto& list : lowered.ranks) sum += static_cast<std::int64_t>(list.size());
  return sum;
}

void check_schedule(benchmark::State& state) {
  const auto lowered = pipeline(static_cast<int>(state.range(0)), static_cast<int>(state.range(1)));
  for (auto _ : state) benchmark::DoNotOptimize(schedule::check(lowered).has_value());
  state.SetItemsProcessed(state.iterations() * actions(lowered));
}

void simulate_step(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  const int micro_batches = static_cast<int>(state.range(1));
  const auto lowered = pipeline(ranks, micro_batches);
  const StageCost cost{.forward = Nanoseconds{1000},
                       .input_gradient = Nanoseconds{1000},
                       .weight_gradient = Nanoseconds{1000}};
  const std::vector<StageCost> costs(static_cast<std::size_t>(ranks), cost);
  const cost::Cluster cluster = cost::equal_ranks(ranks);
  // Equal stages: (M + P - 1) (F + B).
  DYNMO_CHECK(
      simulate(lowered, costs, cluster)->step_time.count() == 3000LL * (micro_batches + ranks - 1),
      "the closed form");
  for (auto _ : state) benchmark::DoNotOptimize(simulate(lowered, costs, cluster)->bubble);
  state.SetItemsProcessed(state.iterations() * actions(lowered));
}

BENCHMARK(check_schedule)->Args({8, 32})->Args({64, 256})->Args({256, 1024});
BENCHMARK(simulate_step)->Args({8, 32})->Args({64, 256})->Args({256, 1024});

}  // namespace
}  // namespace dynmo::sim
