// SPDX-License-Identifier: Apache-2.0
// A training that freezes layers, on ranks with 0.6 of the memory without which no cut would do. It
// recomputes some layers and moves others while it trains.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dynmo/dynamism/training/source.h"
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

// The most that a rank has saved in a step, and that its plan says.
struct Peak {
  std::int64_t step = 0;
  Rank rank;
  Bytes measured;
  Bytes planned;      // peak memory without the state of the layers
  bool fits = false;  // with the state of the layers
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
    return plan::propose(balancer, {{free.model, ranks, free.micro_batches}, free.schedule})
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
    plan::BalanceProblem problem{{costs, cluster, run.micro_batches}, run.schedule};
    problem.recompute = run.recompute;
    if (measuring.grid().position() == Rank(0)) {
      result.need = least_memory(options.policy.balancer, problem);
    }
    DYNMO_ASSIGN(plan::Proposal proposal, plan::propose(options.policy.balancer, problem));
    return std::move(proposal.plan);
  };
  on_rank.step = [&](Pipeline& pipeline, const Pipeline::Batches& batches) -> Expected<StepReport> {
    if (run.before_step) DYNMO_TRY(run.before_step(pipeline, pipeline.next_step()));
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
                            .fits = planned[rank.index()] <= run.memory,
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

model::LlamaConfig with_many_activations() {
  model::LlamaConfig config = runtime::testing::small_model();
  config.shape.sequence = 256;  // so that they are most of the memory
  return config;
}

// Trains with all the memory, then with 0.6 of the need. `limits` prepares the second run.
std::pair<Trained, Trained> trained_twice(
    runtime::testing::RunOptions& run, const std::filesystem::path& trace,
    const std::function<void()>& limits = [] {}) {
  const model::LlamaConfig config = with_many_activations();
  run.balancing = runtime::Balancing::kAutomatic;
  run.recompute = plan::Recompute::kNone;
  run.memory = cost::kUnlimitedMemory;
  Trained free = trained(config, run, trace);
  EXPECT_TRUE(free.told.status) << free.told.status.error().message;
  run.recompute = plan::Recompute::kAuto;
  run.memory = Bytes{free.need.value * 6 / 10};
  limits();
  return {std::move(free), trained(config, run, trace)};
}

void expect_the_same_bits_in_the_planned_memory(const Trained& free, const Trained& limited) {
  ASSERT_TRUE(limited.told.status) << limited.told.status.error().message;
  EXPECT_EQ(limited.losses, free.losses);
  EXPECT_EQ(limited.states, free.states);
  EXPECT_EQ(std::ssize(limited.states), runtime::testing::kLayers);
  for (const Trained* training : {&free, &limited}) {
    for (const Peak& peak : training->peaks) {
      EXPECT_EQ(peak.measured, peak.planned)
          << "step " << peak.step << " rank " << peak.rank.value << " under " << peak.plan;
      EXPECT_TRUE(peak.fits) << "step " << peak.step << " rank " << peak.rank.value;
    }
  }
  EXPECT_TRUE(std::ranges::none_of(free.peaks, std::identity(), &Peak::recomputes));
  EXPECT_TRUE(std::ranges::any_of(limited.peaks, std::identity(), &Peak::recomputes));
}

TEST(LimitedMemory, AFreezingRunWithSixTenthsOfItsNeedIsTheRunWithAllOfIt) {
  runtime::testing::RunOptions run{.steps = 24, .micro_batches = 4};
  run.freezing = runtime::testing::freezing();
  for (const std::vector<int>& cut : {std::vector<int>{4, 4}, {3, 2, 3}}) {
    SCOPED_TRACE(fmt::format("{} ranks", cut.size()));
    TempFolder folder;
    const std::filesystem::path trace = folder.path() / "trace.jsonl";
    run.cut = cut;
    const auto [free, limited] = trained_twice(run, trace);
    expect_the_same_bits_in_the_planned_memory(free, limited);
    EXPECT_FALSE(limited.told.decisions.empty()) << "layers freeze in every third step";
    testing::expect_the_same(limited.told, trace, static_cast<int>(cut.size()),
                             runtime::testing::pipeline_options(with_many_activations(), run));
  }
}

// Five layers are frozen for four steps.
class FrozenAwhile final : public dynamism::Source {
 public:
  std::string_view name() const override { return "awhile"; }
  std::optional<int> freezes(const dynamism::Boundary& now) const override {
    return now.step >= 4 && now.step < kEnd ? 5 : 0;
  }
  Expected<dynamism::Change> before_step(const dynamism::Boundary& now) override {
    return dynamism::Change{.frozen_layers = freezes(now)};
  }

  static constexpr std::int64_t kEnd = 8;
};

// A cut that only fits while layers are frozen.
TEST(LimitedMemory, ACutThatCannotHoldLayersThatTrainAgainIsLeft) {
  runtime::testing::RunOptions run{.steps = 12, .micro_batches = 4, .cut = {4, 4}};
  run.make_sources = [](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(std::make_unique<FrozenAwhile>());
    return sources;
  };
  TempFolder folder;
  const auto [free, limited] = trained_twice(run, folder.path() / "trace.jsonl", [&] {
    run.before_step = [](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      if (step + 1 != FrozenAwhile::kEnd) return {};
      const plan::Plan& now = pipeline.plan();
      DYNMO_ASSIGN(const bool moved,
                   pipeline.apply(plan::make_plan({6, 2}, now.schedule, now.generation + 1)));
      EXPECT_TRUE(moved);
      return {};
    };
  });
  expect_the_same_bits_in_the_planned_memory(free, limited);
  for (const Peak& peak : limited.peaks) {
    EXPECT_TRUE(peak.step < FrozenAwhile::kEnd || peak.plan != "6|2") << "step " << peak.step;
  }
}

}  // namespace
}  // namespace dynmo::train
