// SPDX-License-Identifier: Apache-2.0
// The messages that a pipeline sends are those that plan/traffic.h predicts, to the byte: every
// schedule, one to three replicas, accumulation, layers that freeze, moves.
#include "dynmo/plan/traffic.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/transport/traffic.h"
#include "pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

// Without control; reductions as bytes alone, since their messages depend on parameters.
TrafficRows predictable(TrafficRows rows) {
  std::erase_if(rows, [](const TrafficRow& row) { return row.purpose == Purpose::kControl; });
  for (TrafficRow& row : rows) {
    if (row.purpose == Purpose::kReduction) row.count.messages = 1;
  }
  return rows;
}

void add(std::vector<TrafficRow>& sum, const TrafficRows& rows) {
  sum.insert(sum.end(), rows.begin(), rows.end());
}

TEST(Traffic, MeasuredIsPredictedToTheByte) {
  constexpr int kSteps = 7;
  int reductions = 0;
  int moves = 0;
  std::atomic<int> gradients = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    Rng rng(mix_key({0x72AFF1C, seed}));
    const auto pick = [&](int low, int high) {
      return low + static_cast<int>(rng.below(static_cast<std::uint64_t>(high - low) + 1));
    };
    const int ranks = pick(2, 3);
    RunOptions run{.steps = kSteps, .micro_batches = ranks * pick(1, 2)};
    run.replicas = pick(1, 3);
    run.accumulation = pick(1, 2);
    if (pick(0, 1) == 1) run.freezing = freezing();
    const PipelineOptions options = pipeline_options(small_model(), run);
    const model::Model layers = model::make_llama(small_model());
    const plan::Plan plan = plan::make_plan(ranks == 2 ? std::vector{3, 5} : std::vector{2, 3, 3},
                                            schedule::ScheduleKind::k1F1B);
    const bool during = pick(0, 1) == 1;  // a step, where layers move
    const auto move = random_plans(seed, ranks, run.micro_batches, {},
                                   during ? MoveHow::kDuringStep : MoveHow::kNow);
    const auto status = transport::run_ranks(
        ranks * run.replicas, [&](transport::Transport& inner) -> Expected<void> {
          at::set_num_threads(1);
          transport::CountingTransport counting(inner);
          const Rank position(inner.rank().value % ranks);
          Pipeline pipeline(counting, layers, options,
                            {plan, initial_states(layers, plan, position, 1)});
          std::vector<TrafficRow> predicted;
          for (std::int64_t step = 0; step < kSteps; ++step) {
            plan::Plan before = pipeline.coming_plan() ? *pipeline.coming_plan() : pipeline.plan();
            const auto known = pipeline.profiler().known(pipeline.frozen_layers());
            DYNMO_TRY(move(pipeline, step));
            if (pipeline.plan().generation < before.generation) before = pipeline.plan();
            add(predicted, plan::traffic_of(plan::difference(before, pipeline.plan(), known), ranks,
                                            run.replicas));
            DYNMO_ASSIGN(const StepReport report,
                         pipeline.step([&](std::int64_t s, MicroBatchId id) {
                           return batch(small_model(), 1, s, id);
                         }));
            if (const plan::Plan* coming = pipeline.coming_plan()) {
              const auto now = pipeline.profiler().known(report.frozen_layers);
              const plan::Migration moved = plan::difference(pipeline.plan(), *coming, now);
              add(predicted, plan::traffic_of(moved, ranks, run.replicas));
              add(predicted, plan::traffic_of_gradients(moved, now, ranks, run.replicas));
              gradients += moved.moves.empty() ? 0 : 1;
            }
            add(predicted,
                plan::traffic_of(pipeline.plan(), pipeline.profiler().known(report.frozen_layers),
                                 run.micro_batches * run.accumulation, run.replicas));
          }
          DYNMO_ASSIGN(
              const TrafficRows measured,
              transport::gather_rows(inner, transport::control_tag(transport::Control::kUser),
                                     counting.row()));
          EXPECT_EQ(predictable(measured), predictable(sums_of(predicted))) << "seed " << seed;
          if (inner.rank().value > 0) return {};
          for (const TrafficRow& row : measured) {
            reductions += row.purpose == Purpose::kReduction ? 1 : 0;
            moves += row.purpose == Purpose::kMigration ? 1 : 0;
          }
          return {};
        });
    ASSERT_TRUE(status) << "seed " << seed << ": " << status.error().message;
  }
  EXPECT_GT(reductions, 50);
  EXPECT_GT(moves, 50);
  EXPECT_GT(gradients, 50);  // moves during steps, on all ranks
}

}  // namespace
}  // namespace dynmo::runtime::testing
