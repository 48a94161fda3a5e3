// SPDX-License-Identifier: Apache-2.0
// A training that freezes layers, on ranks with 0.6 of the memory without which no cut would do. It
// recomputes some layers and moves others while it trains.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "dynmo/model/state_bytes.h"
#include "dynmo/plan/propose.h"
#include "tests/runtime/pipeline_fixture.h"
#include "tests/support/temp_folder.h"
#include "tests/train/decided_again.h"
#include "tests/train/saved_meter.h"

namespace dynmo::train {
namespace {

using runtime::Pipeline;
using runtime::PipelineOptions;
using runtime::StepReport;

// What a rank has saved at most in a step, and what its plan says.
struct Peak {
  std::int64_t step = 0;
  Rank rank;
  Bytes measured;
  Bytes planned;  // peak memory without the state of the layers
  bool recomputes = false;
  std::string plan;
};

struct Trained {
  testing::Told told;
  Bytes need;  // the least memory of a rank with which a cut fits, if nothing is recomputed
  std::vector<double> losses;
  std::map<int, std::string> states;  // by layer: digest of values and moments
  std::vector<Peak> peaks;
};

Bytes state_of(Rank rank, const Pipeline& pipeline) {
  Bytes bytes;
  const cost::ModelCost costs = *pipeline.costs();
  for (int i = 0; i < costs.size(); ++i) {
    if (pipeline.plan().owner(LayerId(i)) == rank) {
      bytes += cost::state_bytes(costs.layers[static_cast<std::size_t>(i)]);
    }
  }
  return bytes;
}

// Bisects.
Bytes least_memory(plan::Balancer balancer, const plan::BalanceProblem& free) {
  const auto fits = [&](Bytes memory) {
    const cost::Cluster ranks = cost::equal_ranks(free.cluster.size(), memory);
    return plan::propose(balancer, {.model = free.model,
                                    .cluster = ranks,
                                    .micro_batches = free.micro_batches,
                                    .schedule = free.schedule})
        .has_value();
  };
  Bytes less{0};
  Bytes enough{1 << 30};
  EXPECT_TRUE(fits(enough));
  while (less + Bytes{1} < enough) {
    const Bytes middle{(less + enough).value / 2};
    (fits(middle) ? enough : less) = middle;
  }
  return enough;
}

// Trains as `dynmo train` does: under the balancer's plan for the measured costs.
Trained trained(const model::LlamaConfig& config, const runtime::testing::RunOptions& run,
                const std::filesystem::path& trace) {
  const PipelineOptions options = runtime::testing::pipeline_options(config, run);
  Trained result;
  std::mutex mutex;
  testing::OnRank on_rank;
  on_rank.first_plan = [&](const Pipeline& measuring) -> Expected<plan::Plan> {
    const cost::ModelCost costs = *measuring.costs();
    const cost::Cluster cluster = measuring.cluster();
    const plan::BalanceProblem problem{.model = costs,
                                       .cluster = cluster,
                                       .micro_batches = run.micro_batches,
                                       .schedule = run.schedule,
                                       .recompute = run.recompute};
    if (measuring.grid().position() == Rank(0)) {
      result.need = least_memory(options.policy.balancer, problem);
    }
    DYNMO_ASSIGN(plan::Proposal proposal, plan::propose(options.policy.balancer, problem));
    return std::move(proposal.plan);
  };
  on_rank.step = [&](Pipeline& pipeline, const Pipeline::Batches& batches) -> Expected<StepReport> {
    const testing::SavedMeter meter;
    DYNMO_ASSIGN(const StepReport report, pipeline.step(batches));
    const Rank rank = pipeline.grid().position();
    DYNMO_ASSIGN(const auto planned, plan::peak_memory(pipeline.plan(), *pipeline.costs(),
                                                       run.micro_batches, pipeline.recomputed()));
    const std::lock_guard lock(mutex);
    result.peaks.push_back({.step = report.step,
                            .rank = rank,
                            .measured = meter.peak(),
                            .planned = planned[rank.index()] - state_of(rank, pipeline),
                            .recomputes = !pipeline.recomputed().empty(),
                            .plan = plan::to_string(pipeline.plan())});
    if (rank == Rank(0)) result.losses.push_back(report.loss);
    if (report.step + 1 == run.steps) {
      for (const auto& [id, state] : pipeline.states()) {
        result.states[id.value] = model::digest(state).hex();
      }
    }
    return report;
  };
  const auto batches = [&](std::int64_t step, MicroBatchId id) {
    return runtime::testing::batch(config, run.seed, step, id);
  };
  result.told = testing::train(testing::metered(model::make_llama(config)), options, run.cut,
                               batches, trace, on_rank);
  return result;
}

// Bits, memory and decisions.
TEST(LimitedMemory, AFreezingRunWithSixTenthsOfItsNeedIsTheRunWithAllOfIt) {
  model::LlamaConfig config = runtime::testing::small_model();
  config.shape.sequence = 256;  // so that activations are most of the memory
  runtime::testing::RunOptions run{.steps = 24, .micro_batches = 4};
  run.freezing = runtime::testing::freezing();
  run.balancing = runtime::Balancing::kAutomatic;
  for (const std::vector<int>& cut : {std::vector<int>{4, 4}, {3, 2, 3}}) {
    SCOPED_TRACE(fmt::format("{} ranks", cut.size()));
    TempFolder folder;
    run.cut = cut;
    run.recompute = plan::Recompute::kNone;
    run.memory = cost::kUnlimitedMemory;
    const Trained free = trained(config, run, folder.path() / "free.jsonl");
    ASSERT_TRUE(free.told.status) << free.told.status.error().message;
    run.recompute = plan::Recompute::kAuto;
    run.memory = Bytes{free.need.value * 6 / 10};
    const std::filesystem::path trace = folder.path() / "trace.jsonl";
    const Trained limited = trained(config, run, trace);
    ASSERT_TRUE(limited.told.status) << limited.told.status.error().message;

    EXPECT_EQ(limited.losses, free.losses);
    EXPECT_EQ(limited.states, free.states);
    EXPECT_EQ(std::ssize(limited.states), runtime::testing::kLayers);

    for (const Trained* training : {&free, &limited}) {
      for (const Peak& peak : training->peaks) {
        EXPECT_EQ(peak.measured, peak.planned)
            << "step " << peak.step << " rank " << peak.rank.value << " under " << peak.plan;
      }
    }
    EXPECT_TRUE(std::ranges::all_of(free.peaks, std::logical_not<>(), &Peak::recomputes));
    EXPECT_TRUE(std::ranges::any_of(limited.peaks, std::identity(), &Peak::recomputes));

    EXPECT_FALSE(limited.told.decisions.empty()) << "layers freeze in every third step";
    testing::expect_the_same(limited.told, trace, static_cast<int>(cut.size()),
                             runtime::testing::pipeline_options(config, run));
  }
}

}  // namespace
}  // namespace dynmo::train
