// SPDX-License-Identifier: Apache-2.0
// Actions a second: ZB-V for many ranks from its shape, beside 1F1B of as many actions; and as CSV
// out and in.
#include <benchmark/benchmark.h>

#include "dynmo/core/check.h"
#include "dynmo/schedule/csv.h"
#include "dynmo/schedule/generate.h"

namespace dynmo::schedule {
namespace {

constexpr int kMicroBatches = 64;

PipelineShape shape_on(const std::vector<Rank>& placement, int ranks, int micro_batches) {
  PipelineShape shape{.ranks = ranks, .micro_batches = micro_batches, .stages = {}};
  for (const Rank rank : placement) shape.stages.push_back({.rank = rank});
  return shape;
}

PipelineShape v_shape(int ranks) {
  return shape_on(wave_placement(ranks, 2), ranks, kMicroBatches);
}

std::int64_t actions(const Schedule& schedule) {
  std::int64_t sum = 0;
  for (const auto& list : schedule.ranks) sum += static_cast<std::int64_t>(list.size());
  return sum;
}

void make(benchmark::State& state, ScheduleKind kind, const PipelineShape& shape) {
  const std::int64_t made = actions(make_schedule(kind, shape).value());
  DYNMO_CHECK(made == std::int64_t{6} * shape.ranks * kMicroBatches, "6 M actions a rank, got {}",
              made);
  for (auto _ : state) benchmark::DoNotOptimize(make_schedule(kind, shape).has_value());
  state.SetItemsProcessed(state.iterations() * made);
  state.SetComplexityN(made);
}

void make_zb_v(benchmark::State& state) {
  make(state, ScheduleKind::kZbV, v_shape(static_cast<int>(state.range(0))));
}

void make_1f1b(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0));
  make(state, ScheduleKind::k1F1B, shape_on(loop_placement(ranks, 1), ranks, 3 * kMicroBatches));
}

void csv_out(benchmark::State& state) {
  const Schedule zb_v =
      make_schedule(ScheduleKind::kZbV, v_shape(static_cast<int>(state.range(0)))).value();
  for (auto _ : state) benchmark::DoNotOptimize(write_csv(zb_v).size());
  state.SetItemsProcessed(state.iterations() * actions(zb_v));
}

void csv_in(benchmark::State& state) {
  const Schedule zb_v =
      make_schedule(ScheduleKind::kZbV, v_shape(static_cast<int>(state.range(0)))).value();
  const std::string text = write_csv(zb_v);
  DYNMO_CHECK(read_csv(text, "written").value().schedule == zb_v, "the schedule written");
  for (auto _ : state) benchmark::DoNotOptimize(read_csv(text, "written").has_value());
  state.SetItemsProcessed(state.iterations() * actions(zb_v));
}

BENCHMARK(make_1f1b)->RangeMultiplier(4)->Range(64, 4096)->Complexity(benchmark::oN);
BENCHMARK(make_zb_v)->RangeMultiplier(4)->Range(64, 4096)->Complexity(benchmark::oN);
BENCHMARK(csv_out)->Arg(256);
BENCHMARK(csv_in)->Arg(256);

}  // namespace
}  // namespace dynmo::schedule
