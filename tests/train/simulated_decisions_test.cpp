// SPDX-License-Identifier: Apache-2.0
// The loop that decides is one: what a run decides, the simulator decides again from what the run
// has written down.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dynmo/dynamism/early_exit/source.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/dynamism/registry.h"
#include "dynmo/model/emulated.h"
#include "dynmo/plan/migration.h"
#include "dynmo/scenario/run.h"
#include "dynmo/train/load_trace_writer.h"
#include "tests/plan/cuts.h"
#include "tests/runtime/blinking_source.h"
#include "tests/runtime/pipeline_fixture.h"
#include "tests/support/temp_folder.h"

namespace dynmo::train {
namespace {

using runtime::Balancing;
using runtime::Pipeline;
using runtime::PipelineOptions;

// These parts of a decision must be equal.
using Decided = std::tuple<std::int64_t, bool, plan::Plan, std::string, std::string>;

Decided decided(std::int64_t step, const control::Decision& decision) {
  return {step, decision.migrate, decision.plan, decision.why, decision.reason};
}

// As `dynmo simulate` runs it: one policy over the load with its recording.
std::vector<Decided> simulated(std::unique_ptr<dynamism::LoadModel> load, int ranks,
                               const PipelineOptions& options) {
  EXPECT_NE(load->recording(), nullptr);
  scenario::Job job;
  job.scenario.cluster.pipeline_ranks = ranks;
  job.scenario.cluster.data_parallel = options.replicas;
  job.scenario.training.steps = options.steps;
  job.scenario.training.micro_batches = options.micro_batches;
  job.scenario.policy.minimum_gain = options.policy.minimum_gain;
  job.scenario.policy.noise_factor = options.policy.noise_factor;
  job.scenario.policy.window = options.profile_window;
  job.device = cost::find_device("h100").value();
  job.load = std::move(load);
  const auto run = scenario::run(job, *job.load, scenario::parse_policy("optimal").value());
  EXPECT_TRUE(run) << run.error().message;
  std::vector<Decided> result;
  if (!run) return result;
  for (const scenario::DecisionAt& at : run->decisions) {
    result.push_back(decided(at.step, at.decision));
  }
  return result;
}

struct Told {
  Expected<void> status;
  std::vector<Decided> decisions;
};

// A training of `layers` on as many ranks as the cut has parts, its load trace at `trace`.
Told train(const model::Model& layers, const PipelineOptions& options, const std::vector<int>& cut,
           const Pipeline::Batches& batches, const std::filesystem::path& trace) {
  Told told;
  const plan::Plan plan = plan::make_plan(cut, schedule::ScheduleKind::k1F1B);
  told.status =
      transport::run_ranks(plan.ranks, [&](transport::Transport& transport) -> Expected<void> {
        at::set_num_threads(1);
        const Rank rank(transport.rank().value);
        // As first_plan does: one pipeline measures, another one trains.
        const auto states = [&] {
          return runtime::RankState{plan,
                                    runtime::initial_states(layers, plan, rank, options.seed)};
        };
        Pipeline measuring(transport, layers, options, states());
        DYNMO_TRY(measuring.measure(batches, 4));
        Pipeline pipeline(transport, layers, options, states());
        DYNMO_TRY(pipeline.use(measuring.profiler()));
        DYNMO_ASSIGN(const auto writer, LoadTraceWriter::open(trace, 1));
        const bool first = rank == Rank(0);
        if (first) {
          writer->start({.plan = plan,
                         .measured_under = plan,
                         .measured = pipeline.profiler().observations()});
        }
        for (std::int64_t step = 0; step < options.steps; ++step) {
          DYNMO_ASSIGN(const runtime::StepReport report, pipeline.step(batches));
          if (!first) continue;
          if (report.decision) told.decisions.push_back(decided(step, *report.decision));
          writer->add(report, pipeline);
        }
        return first ? writer->close() : Expected<void>();
      });
  return told;
}

void expect_the_same(const Told& told, const std::filesystem::path& trace, int ranks,
                     const PipelineOptions& options) {
  ASSERT_TRUE(told.status) << told.status.error().message;
  auto load = dynamism::read_trace(trace);
  ASSERT_TRUE(load) << load.error().message;
  const std::vector<Decided> again = simulated(std::move(*load), ranks, options);
  ASSERT_EQ(again.size(), told.decisions.size());
  for (std::size_t i = 0; i < again.size(); ++i) {
    EXPECT_EQ(again[i], told.decisions[i])
        << "step " << std::get<0>(told.decisions[i]) << ": " << std::get<4>(told.decisions[i])
        << "\nagain step " << std::get<0>(again[i]) << ": " << std::get<4>(again[i]);
  }
}

PipelineOptions options_for(int steps, int micro_batches) {
  PipelineOptions options;
  options.steps = steps;
  options.micro_batches = micro_batches;
  options.balancing = Balancing::kAutomatic;
  return options;
}

TEST(SimulatedDecisions, OfARunThatFreezesAreTheRunsOwn) {
  runtime::testing::RunOptions run{.steps = 30, .micro_batches = 4};
  run.freezing = runtime::testing::freezing();
  run.balancing = Balancing::kAutomatic;
  const model::LlamaConfig config = runtime::testing::small_model();
  const PipelineOptions options = runtime::testing::pipeline_options(config, run);
  const auto batches = [&](std::int64_t step, MicroBatchId id) {
    return runtime::testing::batch(config, run.seed, step, id);
  };
  for (const int ranks : {2, 3}) {
    TempFolder folder;
    const std::filesystem::path trace = folder.path() / "trace.jsonl";
    const std::vector<int> cut = ranks == 2 ? std::vector<int>{4, 4} : std::vector<int>{2, 3, 3};
    const Told told = train(model::make_llama(config), options, cut, batches, trace);
    EXPECT_FALSE(told.decisions.empty()) << "layers freeze in every third step";
    expect_the_same(told, trace, ranks, options);
  }
}

// Messages shrink while tokens leave: the run plans with the bytes of the step before.
TEST(SimulatedDecisions, OfARunWhoseTokensLeaveAreTheRunsOwn) {
  dynamism::EarlyExitOptions exits;
  exits.survivors = 0.2;
  exits.exit_every = 1;
  exits.warm_up = 2;
  exits.ramp_steps = 4;
  runtime::testing::RunOptions run{.steps = 30, .micro_batches = 4};
  run.balancing = Balancing::kAutomatic;
  run.make_sources = [exits](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_early_exit_source(exits));
    return sources;
  };
  const model::LlamaConfig config = runtime::testing::small_model();
  const PipelineOptions options = runtime::testing::pipeline_options(config, run);
  const auto batches = [&](std::int64_t step, MicroBatchId id) {
    return runtime::testing::batch(config, run.seed, step, id);
  };
  TempFolder folder;
  const std::filesystem::path trace = folder.path() / "trace.jsonl";
  const Told told = train(runtime::testing::shaped(model::make_llama(config), run.make_sources),
                          options, {3, 5}, batches, trace);
  expect_the_same(told, trace, 2, options);
  const auto load = dynamism::read_trace(trace);
  ASSERT_TRUE(load) << load.error().message;
  const dynamism::Recording* recording = (*load)->recording();
  ASSERT_NE(recording, nullptr);
  for (std::int64_t step = 0; step < run.steps; ++step) {
    const auto& measured = recording->steps.at(step).layers;
    EXPECT_EQ(measured[1].boundary_bytes, Bytes{0}) << "no row has left before the first exit";
    for (const std::size_t i : {2, 4, 6}) {
      EXPECT_EQ(measured[i].boundary_bytes, (*load)->at(step).layers[i].boundary_bytes);
    }
  }
  EXPECT_LT((*load)->at(29).layers[4].boundary_bytes, (*load)->at(2).layers[4].boundary_bytes);
}

// Layers that sleep: what they take is known, and the machine's noise comes on top.
class Emulated {
 public:
  explicit Emulated(std::function<double(std::int64_t step, int layer)> forward_s)
      : forward_s_(std::move(forward_s)) {}

  cost::ModelCost at(std::int64_t step) const {
    cost::ModelCost costs;
    for (int i = 0; i < kLayers; ++i) {
      const double seconds = forward_s_(step, i);
      costs.layers.push_back({.name = fmt::format("layer{}", i),
                              .forward_s = seconds,
                              .backward_input_s = seconds,
                              .backward_weight_s = seconds,
                              .parameter_bytes = Bytes{4096},
                              .gradient_bytes = Bytes{4096},
                              .optimizer_bytes = Bytes{8192},
                              .copy_bytes = {},
                              .activation_bytes = Bytes{64},
                              .boundary_bytes = Bytes{64}});
    }
    return costs;
  }

  Told train(const PipelineOptions& asked, const std::vector<int>& cut,
             const std::filesystem::path& trace) const {
    PipelineOptions options = asked;
    options.boundary_shape = model::emulated_boundary(at(0));
    const auto layers = model::make_emulated({.costs = [this](std::int64_t s) { return at(s); }});
    EXPECT_TRUE(layers) << layers.error().message;
    const auto nothing = [](std::int64_t, MicroBatchId) {
      return runtime::MicroBatch{at::zeros({1, 1}, at::kLong), at::zeros({1, 1}, at::kLong)};
    };
    return train::train(*layers, options, cut, nothing, trace);
  }

  static constexpr int kLayers = 9;

 private:
  std::function<double(std::int64_t, int)> forward_s_;
};

// From step 20 on, the layers of what was rank 1 take three times as long, and nobody says so.
TEST(SimulatedDecisions, OfARunWithASlowRankAreTheRunsOwn) {
  const Emulated emulated(
      [](std::int64_t step, int layer) { return step >= 20 && layer / 3 == 1 ? 1.5e-3 : 0.5e-3; });
  TempFolder folder;
  const std::filesystem::path trace = folder.path() / "trace.jsonl";
  const PipelineOptions options = options_for(40, 4);
  const Told told = emulated.train(options, {3, 3, 3}, trace);
  EXPECT_FALSE(told.decisions.empty());
  expect_the_same(told, trace, 3, options);
}

TEST(SimulatedDecisions, OfARunWithNoiseAloneAreTheRunsOwn) {
  const Emulated emulated([](std::int64_t step, int layer) {
    Rng rng(mix_key({5, static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(layer)}));
    return 0.4e-3 * (1 + 0.2 * rng.uniform());
  });
  TempFolder folder;
  const std::filesystem::path trace = folder.path() / "trace.jsonl";
  const PipelineOptions options = options_for(50, 4);
  const Told told = emulated.train(options, {2, 4, 3}, trace);
  expect_the_same(told, trace, 3, options);
}

// A run that never was: the pipeline's caller of the controller, fed with drawn measurements.
struct Drawn {
  explicit Drawn(std::uint64_t seed) : rng(mix_key({0xDEC1, seed})) {
    ranks = plan::pick(rng, 2, 4);
    options.steps = plan::pick(rng, 20, 40);
    options.micro_batches = plan::pick(rng, 1, 8);
    options.accumulation = plan::pick(rng, 1, 3);
    options.replicas = plan::pick(rng, 1, 2);
    options.profile_window = plan::pick(rng, 3, 6);
    const int layers = plan::pick(rng, ranks, 12);
    for (int i = 0; i < layers; ++i) {
      known.layers.push_back({.name = fmt::format("layer{}", i),
                              .parameter_bytes = Bytes{plan::pick(rng, 0, 1 << 20)},
                              .gradient_bytes = Bytes{plan::pick(rng, 0, 1 << 20)},
                              .optimizer_bytes = Bytes{plan::pick(rng, 0, 1 << 20)},
                              .copy_bytes = {},
                              .activation_bytes = Bytes{plan::pick(rng, 1, 1 << 16)},
                              .boundary_bytes = Bytes{plan::pick(rng, 1, 1 << 16)}});
      seconds.push_back(1e-3 * (0.2 + rng.uniform()));
    }
    noise = 0.1 * rng.uniform();
    plan = plan::make_plan(runtime::testing::random_cut(rng, layers, ranks),
                           schedule::ScheduleKind::k1F1B);
  }

  runtime::Exchange exchange() {
    runtime::Exchange step;
    for (std::size_t i = 0; i < seconds.size(); ++i) {
      const double time = seconds[i] * std::max(0.1, 1 + noise * rng.normal());
      const bool frozen = i < static_cast<std::size_t>(frozen_layers);
      step.layers.push_back({.time = {time, frozen ? 0 : time, frozen ? 0 : time},
                             .update_s = frozen ? 0 : 0.1 * time,
                             .stash_bytes = {}});
    }
    step.beside = {.overhead_s = 1e-4 * rng.uniform(),
                   .action_s = 1e-6 * rng.uniform(),
                   .message_s = 1e-6 * rng.uniform(),
                   .reduction_bytes_per_s = {}};
    if (options.replicas > 1) step.beside.reduction_bytes_per_s = 1e9 * (1 + rng.uniform());
    step.plan_s = 1e-4 * rng.uniform();
    step.migrate_s = 1e-3 * rng.uniform();
    return step;
  }

  // Layers freeze, train again, change announced or not, are pruned, or nothing happens.
  cost::Announced change() {
    const double drawn = rng.uniform();
    if (drawn < 0.05 && frozen_layers + 1 < known.size()) {
      ++frozen_layers;
      return cost::Announced::kKnown;
    }
    if (drawn > 0.97 && frozen_layers > 0) {
      frozen_layers = 0;
      return cost::Announced::kKnown;
    }
    if (drawn > 0.2) return cost::Announced::kNothing;
    const bool predicted = drawn > 0.15;
    for (std::size_t i = 0; i < seconds.size(); ++i) {
      if (rng.uniform() >= 0.3) continue;
      const double factor = 0.5 + rng.uniform();
      seconds[i] *= factor;
      if (predicted) known.layers[i].product_time *= std::min(1.0, factor);
    }
    if (predicted) return cost::Announced::kPredicted;
    return drawn < 0.1 ? cost::Announced::kWork : cost::Announced::kNothing;
  }

  Rng rng;
  PipelineOptions options;
  int ranks = 0;
  cost::ModelCost known;
  std::vector<double> seconds;
  double noise = 0;
  plan::Plan plan;
  int frozen_layers = 0;
};

TEST(SimulatedDecisions, OfAThousandDrawnTracesAreThoseOfThePipelinesCaller) {
  std::size_t decisions = 0;
  std::size_t moves = 0;
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    Drawn run(seed);
    runtime::Decisions caller(run.known, run.ranks, run.options, 0);
    dynamism::RunStart start{.plan = run.plan,
                             .measured_under = run.plan,
                             .measured = {},
                             .replicas = run.options.replicas,
                             .accumulation = run.options.accumulation};
    for (int i = plan::pick(run.rng, 1, 4); i > 0; --i) {
      caller.observe(run.exchange(), run.plan, 0);
    }
    start.measured = caller.profiler().observations();
    runtime::Decisions pipeline(run.known, run.ranks, run.options, 0);
    pipeline.use(caller.profiler());
    dynamism::TraceLines lines;
    lines.start(std::move(start));
    std::string text;
    std::vector<Decided> told;
    const plan::LayerSet none;
    for (std::int64_t step = 0; step < run.options.steps; ++step) {
      if (step > 0) {
        const cost::Announced change = run.change();
        pipeline.know(run.known);
        pipeline.announce(change, step);
      }
      auto decision = pipeline.decide({run.plan, step, run.frozen_layers, none});
      ASSERT_TRUE(decision) << "seed " << seed << ": " << decision.error().message;
      if (*decision) told.push_back(decided(step, **decision));
      if (*decision && (*decision)->migrate) {
        pipeline.moved((*decision)->migration.bytes());
        run.plan = (*decision)->plan;
        ++moves;
      }
      pipeline.observe(run.exchange(), run.plan, run.frozen_layers);
      const auto line = lines.add(step, step > 0 ? pipeline.announced() : cost::Announced::kNothing,
                                  *pipeline.costs(run.frozen_layers), &pipeline.observed());
      ASSERT_TRUE(line) << "seed " << seed << ": " << line.error().message;
      text += *line;
    }
    auto load = dynamism::parse_trace(text, "drawn");
    ASSERT_TRUE(load) << "seed " << seed << ": " << load.error().message;
    ASSERT_EQ(simulated(std::move(*load), run.ranks, run.options), told) << "seed " << seed;
    decisions += told.size();
  }
  EXPECT_GT(decisions, 3000U);
  EXPECT_GT(moves, 300U);
}

}  // namespace
}  // namespace dynmo::train
