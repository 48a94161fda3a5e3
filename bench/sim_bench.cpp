// SPDX-License-Identifier: Apache-2.0
// The simulator: actions a second of a lowered schedule, check of the schedule, links, memory and
// idle split included, lowering apart. Beside it, in the same run, the check alone, replays without
// links, and the idle split as two replays would make it.
#include <benchmark/benchmark.h>
#include <sys/resource.h>

#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/schedule/check.h"
#include "dynmo/schedule/generate.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/sim/simulate.h"
#include "dynmo/sim/step_timer.h"

namespace dynmo::sim {
namespace {

using schedule::Schedule;
using schedule::ScheduleKind;

constexpr int kRanksPerNode = 8;

Schedule compute_only(ScheduleKind kind, int ranks, int micro_batches) {
  schedule::PipelineShape shape{ranks, micro_batches, {}};
  const int stages_per_rank = kind == ScheduleKind::kZbV ? 2 : 1;
  for (const Rank rank : schedule::wave_placement(ranks, stages_per_rank)) {
    shape.stages.push_back({rank, false});
  }
  return schedule::make_schedule(kind, shape).value();
}

Schedule pipeline(int ranks, int micro_batches) {
  return schedule::lower(compute_only(ScheduleKind::k1F1B, ranks, micro_batches));
}

std::int64_t actions(const Schedule& schedule) {
  std::int64_t sum = 0;
  for (const auto& list : schedule.ranks) sum += static_cast<std::int64_t>(list.size());
  return sum;
}

// Everything a stage can cost.
std::vector<StageCost> equal_costs(const Schedule& schedule) {
  const StageCost cost{.forward = Nanoseconds{1000},
                       .input_gradient = Nanoseconds{1000},
                       .weight_gradient = Nanoseconds{1000},
                       .update = Nanoseconds{500},
                       .reduction = Nanoseconds{5000},
                       .state = Bytes{1 << 20},
                       .activation = Bytes{1 << 10},
                       .boundary = Bytes{1000}};
  return std::vector<StageCost>(schedule.shape.stages.size(), cost);
}

// Requires a multiple of 8 ranks.
cost::Cluster free_cluster(int ranks) {
  return cost::equal_nodes(ranks / kRanksPerNode, kRanksPerNode);
}

cost::Cluster linked_cluster(int ranks) {
  cost::Cluster cluster = free_cluster(ranks);
  cluster.inside_node = {.latency_s = 20e-9, .bandwidth_bytes_per_s = 100e9};
  cluster.between_nodes = {.latency_s = 100e-9, .bandwidth_bytes_per_s = 10e9};
  return cluster;
}

cost::Cluster queued_cluster(int ranks) {
  cost::Cluster cluster = linked_cluster(ranks);
  cluster.nic_bandwidth_bytes_per_s = 1e9;
  return cluster;
}

void lower_schedule(benchmark::State& state) {
  const Schedule compute = compute_only(ScheduleKind::k1F1B, static_cast<int>(state.range(0)),
                                        static_cast<int>(state.range(1)));
  const std::int64_t lowered = actions(schedule::lower(compute));
  for (auto _ : state) benchmark::DoNotOptimize(schedule::lower(compute).ranks.data());
  state.SetItemsProcessed(state.iterations() * lowered);
}

void check_schedule(benchmark::State& state) {
  const Schedule lowered =
      pipeline(static_cast<int>(state.range(0)), static_cast<int>(state.range(1)));
  for (auto _ : state) benchmark::DoNotOptimize(schedule::check(lowered).has_value());
  state.SetItemsProcessed(state.iterations() * actions(lowered));
}

void replay(benchmark::State& state, const Schedule& lowered, const cost::Cluster& cluster,
            SimOptions options = {}) {
  const std::vector<StageCost> costs = equal_costs(lowered);
  for (auto _ : state) {
    benchmark::DoNotOptimize(simulate(lowered, costs, cluster, options)->bubble);
  }
  state.SetItemsProcessed(state.iterations() * actions(lowered));
  state.SetComplexityN(actions(lowered));
}

void without_links(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  const int micro_batches = static_cast<int>(state.range(1));
  const Schedule lowered = pipeline(ranks, micro_batches);
  // Equal stages: (M + P - 1) (F + B), the reduction behind the last of them, the update.
  const auto result = simulate(lowered, equal_costs(lowered), free_cluster(ranks));
  DYNMO_CHECK(result->step_time.count() == 3000LL * (micro_batches + ranks - 1) + 5000 + 500,
              "the closed form, got {}", result->step_time.count());
  replay(state, lowered, free_cluster(ranks));
}

void with_links(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  replay(state, pipeline(ranks, static_cast<int>(state.range(1))), linked_cluster(ranks));
}

void with_queues(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  replay(state, pipeline(ranks, static_cast<int>(state.range(1))), queued_cluster(ranks));
}

void with_records(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  replay(state, pipeline(ranks, static_cast<int>(state.range(1))), linked_cluster(ranks),
         {.timeline = true, .memory = true});
}

// The check left out, for callers that have made it before.
void checked_before(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  const auto checked =
      CheckedSchedule::make(pipeline(ranks, static_cast<int>(state.range(1)))).value();
  const std::vector<StageCost> costs = equal_costs(checked.schedule());
  const cost::Cluster cluster = linked_cluster(ranks);
  for (auto _ : state) benchmark::DoNotOptimize(simulate(checked, costs, cluster)->bubble);
  state.SetItemsProcessed(state.iterations() * actions(checked.schedule()));
}

// The step time alone, as searches ask for it; checked_before is its baseline.
void step_time_alone(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  StepTimer timer = StepTimer::make(pipeline(ranks, static_cast<int>(state.range(1)))).value();
  const std::vector<StageCost> costs = equal_costs(timer.schedule());
  const cost::Cluster cluster = linked_cluster(ranks);
  DYNMO_CHECK(timer.step_time(costs, cluster).value() ==
                  simulate(timer.schedule(), costs, cluster)->step_time,
              "the simulator's step time");
  for (auto _ : state) benchmark::DoNotOptimize(timer.step_time(costs, cluster).has_value());
  state.SetItemsProcessed(state.iterations() * actions(timer.schedule()));
}

// One iteration of a large job; the whole program's peak of memory, so run this one alone for it.
void zb_v(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  const Schedule lowered =
      schedule::lower(compute_only(ScheduleKind::kZbV, ranks, static_cast<int>(state.range(1))));
  replay(state, lowered, queued_cluster(ranks));
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  state.counters["peak_resident_MiB"] = static_cast<double>(usage.ru_maxrss) / 1024;
  state.counters["actions"] = static_cast<double>(actions(lowered));
}

// The baseline of checked_before's idle split: exposed communication as the difference of two
// replays.
void split_by_two_replays(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  const auto checked =
      CheckedSchedule::make(pipeline(ranks, static_cast<int>(state.range(1)))).value();
  const std::vector<StageCost> costs = equal_costs(checked.schedule());
  std::vector<StageCost> free_costs = costs;
  for (StageCost& cost : free_costs) cost.reduction = Nanoseconds{0};
  const cost::Cluster linked = linked_cluster(ranks);
  const cost::Cluster free = free_cluster(ranks);
  const auto exposed = [&] {
    const auto with = simulate(checked, costs, linked);
    const auto without = simulate(checked, free_costs, free);
    return std::pair{with->step_time - without->step_time, with->ranks[0].split.communication};
  };
  DYNMO_CHECK(exposed().first == exposed().second, "one exposed communication");
  for (auto _ : state) benchmark::DoNotOptimize(exposed());
  state.SetItemsProcessed(state.iterations() * actions(checked.schedule()));
}

BENCHMARK(lower_schedule)->Args({8, 32})->Args({64, 256})->Args({256, 1024});
BENCHMARK(check_schedule)->Args({8, 32})->Args({64, 256})->Args({256, 1024});
BENCHMARK(without_links)->Args({8, 32})->Args({64, 256})->Args({256, 1024});
// Three decades of actions and the fit to a line.
BENCHMARK(with_links)
    ->Args({8, 32})
    ->Args({8, 320})
    ->Args({64, 400})
    ->Args({64, 4000})
    ->Complexity(benchmark::oN);
BENCHMARK(with_links)->Args({64, 256})->Args({256, 1024});
BENCHMARK(with_queues)->Args({8, 32})->Args({64, 256})->Args({256, 1024});
BENCHMARK(with_records)->Args({8, 32})->Args({64, 256})->Args({256, 1024});
BENCHMARK(checked_before)->Args({8, 32})->Args({16, 32})->Args({64, 256})->Args({256, 1024});
BENCHMARK(step_time_alone)->Args({8, 32})->Args({16, 32})->Args({64, 256})->Args({256, 1024});
BENCHMARK(zb_v)->Args({4096, 64})->Unit(benchmark::kMillisecond);
BENCHMARK(split_by_two_replays)->Args({8, 32})->Args({64, 256})->Args({256, 1024});

}  // namespace
}  // namespace dynmo::sim
