// SPDX-License-Identifier: Apache-2.0
// The loop that decides is one: what a run decides, the simulator decides again from what the run
// has written down.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dynmo/core/rng.h"
#include "dynmo/dynamism/load_log.h"
#include "dynmo/dynamism/registry.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/model/emulated/layer.h"
#include "dynmo/plan/migration.h"
#include "dynmo/plan/pack.h"
#include "dynmo/runtime/regroup.h"
#include "dynmo/scenario/run.h"
#include "dynmo/train/traces.h"
#include "tests/runtime/blinking_source.h"
#include "tests/runtime/pipeline_fixture.h"
#include "tests/support/temp_folder.h"
#include "tests/train/decided_again.h"

namespace dynmo::train {
namespace {

using runtime::Balancing;
using runtime::Pipeline;
using runtime::PipelineOptions;
using testing::Decided;
using testing::decided;
using testing::expect_the_same;
using testing::Told;

PipelineOptions options_for(int steps, int micro_batches) {
  PipelineOptions options;
  options.steps = steps;
  options.micro_batches = micro_batches;
  options.balancing = Balancing::kAutomatic;
  return options;
}

// The last rank has the head, whole or in slices.
void a_run_that_freezes(int slices) {
  runtime::testing::RunOptions run{.steps = 30, .micro_batches = 4};
  run.freezing = runtime::testing::freezing();
  run.balancing = Balancing::kAutomatic;
  model::LlamaConfig config = runtime::testing::small_model();
  if (slices > 1) config.shape.vocabulary = std::int64_t{128} * slices;
  config.shape.head_slices = slices;
  const PipelineOptions options = runtime::testing::pipeline_options(config, run);
  const auto batches = [&](std::int64_t step, MicroBatchId id) {
    return runtime::testing::batch(config, run.seed, step, id);
  };
  for (std::vector<int> cut : {std::vector<int>{4, 4}, {2, 3, 3}}) {
    SCOPED_TRACE(fmt::format("{} slices, {} ranks", slices, cut.size()));
    TempFolder folder;
    const std::filesystem::path trace = folder.path() / "trace.jsonl";
    cut.back() += slices - 1;
    const Told told = testing::train(model::make_llama(config), options, cut, batches, trace);
    EXPECT_FALSE(told.decisions.empty()) << "layers freeze in every third step";
    expect_the_same(told, trace, static_cast<int>(cut.size()), options);
    const auto load = dynamism::read_trace(trace);
    ASSERT_TRUE(load) << load.error().message;
    ASSERT_EQ((*load)->at(0).size(), 7 + slices);
    EXPECT_EQ((*load)->at(0).layers.back().name,
              slices == 1 ? "head" : fmt::format("head.{} of {}", slices - 1, slices));
  }
}

TEST(SimulatedDecisions, OfARunThatFreezesAreTheRunsOwn) { a_run_that_freezes(1); }
TEST(SimulatedDecisions, OfARunWithAHeadInSlicesAreTheRunsOwn) { a_run_that_freezes(5); }

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
  const Told told =
      testing::train(runtime::testing::shaped(model::make_llama(config), run.make_sources), options,
                     {3, 5}, batches, trace);
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
    return testing::train(*layers, options, cut, nothing, trace);
  }

  static constexpr int kLayers = 9;

 private:
  std::function<double(std::int64_t, int)> forward_s_;
};

// Steps up to `until`; before that one, ranks of these positions leave and new ones come.
struct Phase {
  std::int64_t until = 0;
  std::vector<int> leave = {};
  int join = 0;
};

// A training whose ranks come and go, each group in threads of its own. Ranks of a replica have
// positions of the scenario: those that come, the next ones.
class Changing {
 public:
  Changing(const Emulated& emulated, PipelineOptions options, const std::vector<int>& cut,
           const std::filesystem::path& trace)
      : options_(std::move(options)),
        plan_(plan::make_plan(cut, schedule::ScheduleKind::k1F1B)),
        states_(static_cast<std::size_t>(options_.replicas) * cut.size()) {
    options_.boundary_shape = model::emulated_boundary(emulated.at(0));
    layers_ = model::make_emulated({.costs = [&emulated](std::int64_t step) {
                return emulated.at(step);
              }}).value();
    for (; next_ < plan_.ranks; ++next_) there_.push_back(next_);
    writer_ = std::move(observe::LoadTraceWriter::open(trace, 1).value());
  }

  Told train(const std::vector<Phase>& phases, int positions) {
    positions_ = positions;
    for (auto phase = phases.begin(); phase != phases.end();) {
      released_.reset();
      staying_.clear();
      for (std::size_t i = 0; i < there_.size(); ++i) {
        const bool leaves = std::ranges::find(phase->leave, there_[i]) != phase->leave.end();
        if (!leaves) staying_.emplace_back(static_cast<std::int32_t>(i));
      }
      auto done = transport::run_ranks(
          static_cast<int>(states_.size()),
          [&](transport::Transport& group) { return train_in(group, phase->until); });
      if (!done) return {done, {}};
      change_group(released_ ? 0 : phase->join);
      if (!released_) ++phase;
    }
    return {writer_->close(), decisions_};
  }

 private:
  static runtime::MicroBatch nothing(std::int64_t, MicroBatchId) {
    return {at::zeros({1, 1}, at::kLong), at::zeros({1, 1}, at::kLong)};
  }

  // One rank's part of a group, until that is to change.
  Expected<void> train_in(transport::Transport& group, std::int64_t until) {
    at::set_num_threads(1);
    const transport::Grid grid(group, options_.replicas);
    const bool first = group.rank() == transport::Member(0);
    runtime::RankState& state = states_[group.rank().index()];
    std::optional<control::Profiler> measured;
    if (plan_.generation > 0) {
      DYNMO_TRY(runtime::regroup(grid, layers_, plan_, state));
    } else if (!begun_) {
      const auto fresh = [&] {
        return runtime::RankState{
            plan_, runtime::initial_states(layers_, plan_, grid.position(), options_.seed)};
      };
      Pipeline measuring(group, layers_, options_, fresh());
      DYNMO_TRY(measuring.measure(nothing, 4));
      measured = measuring.profiler();
      state = fresh();
    }
    Pipeline pipeline(group, layers_, options_, std::move(state));
    DYNMO_TRY(measured ? pipeline.use(*measured) : pipeline.go_on());
    if (first && measured) {
      writer_->start({.plan = plan_,
                      .measured_under = plan_,
                      .measured = measured->observations(),
                      .replicas = options_.replicas});
    }
    if (joined_) {
      DYNMO_ASSIGN(const runtime::StepReport report, pipeline.rebalance());
      if (first) tell(report);
    }
    const bool packs = options_.policy.rank_use == control::RankUse::kFewest;
    std::optional<control::Release> release;
    while (pipeline.next_step() < until && !release) {
      DYNMO_ASSIGN(const runtime::StepReport report, pipeline.step(nothing));
      if (first) tell(report);
      if (first) writer_->add(load_trace_step(report, pipeline));
      if (packs && pipeline.next_step() < until) release = pipeline.release();
    }
    if (!release && !std::ranges::includes(staying_, plan::ranks_at_work(pipeline.plan()))) {
      DYNMO_ASSIGN(const runtime::StepReport report, pipeline.vacate(staying_));
      if (first) tell(report);
    }
    if (first) after_ = pipeline.plan();
    if (first) released_ = release;
    state = pipeline.take_state();
    return {};
  }

  void change_group(int joining) {
    begun_ = true;
    joined_ = joining > 0;
    if (released_) staying_ = released_->kept;
    std::vector<std::optional<Rank>> before(staying_.begin(), staying_.end());
    before.resize(staying_.size() + static_cast<std::size_t>(joining));
    std::vector<runtime::RankState> states(static_cast<std::size_t>(options_.replicas) *
                                           before.size());
    auto place = states.begin();
    for (int replica = 0; replica < options_.replicas; ++replica) {
      for (const auto& was : before) {
        runtime::RankState& next = *place++;
        if (!was) continue;
        next = std::move(states_[static_cast<std::size_t>(replica) * there_.size() + was->index()]);
        next.controller->ranks_changed(before);
      }
    }
    states_ = std::move(states);
    std::vector<int> there;
    for (const Rank rank : staying_) there.push_back(there_[rank.index()]);
    for (int i = 0; i < joining; ++i) there.push_back(next_++);
    there_ = std::move(there);
    plan_ = plan::with_more_ranks(plan::without_others(after_, staying_),
                                  static_cast<int>(there_.size()));
    ++plan_.generation;
  }

  void tell(const runtime::StepReport& report) {
    if (!report.decision) return;
    Decided said = decided(report.step, *report.decision);
    plan::Plan& plan = std::get<2>(said);
    for (plan::PlanStage& stage : plan.stages) stage.rank = Rank(there_[stage.rank.index()]);
    plan.ranks = positions_;
    decisions_.push_back(std::move(said));
  }

  PipelineOptions options_;
  model::Model layers_;
  plan::Plan plan_;  // that the group begins with
  std::vector<runtime::RankState> states_;
  std::vector<int> there_;  // positions, by rank
  int next_ = 0;            // position of the next rank that comes
  int positions_ = 0;
  bool begun_ = false;
  bool joined_ = false;
  std::vector<Rank> staying_;
  std::optional<control::Release> released_;  // here and below: as the first rank says
  plan::Plan after_;
  std::unique_ptr<observe::LoadTraceWriter> writer_;
  std::vector<Decided> decisions_;
};

// A rank is drained, another one comes, then two are packed away.
TEST(SimulatedDecisions, OfARunWhoseRanksComeAndGoAreTheRunsOwn) {
  const Emulated emulated(
      [](std::int64_t step, int layer) { return step >= 30 && layer > 5 ? 0.8e-3 : 0.4e-3; });
  for (const int replicas : {1, 2}) {
    TempFolder folder;
    const std::filesystem::path trace = folder.path() / "trace.jsonl";
    PipelineOptions options = options_for(48, 4);
    options.replicas = replicas;
    Changing run(emulated, options, {3, 3, 3}, trace);
    const Told told = run.train({{.until = 12, .leave = {1}},
                                 {.until = 20, .join = 1},
                                 {.until = 36, .leave = {2, 3}},
                                 {.until = 48}},
                                4);
    EXPECT_GE(told.decisions.size(), 3U);
    expect_the_same(told, trace, 4, options,
                    {{.step = 0, .leave = {3}},
                     {.step = 12, .leave = {1}},
                     {.step = 20, .leave = {}, .join = {3}},
                     {.step = 36, .leave = {2, 3}}});
  }
}

// One layer takes as long as the others together, so that two ranks do; the others are released.
TEST(SimulatedDecisions, OfARunThatPacksAndReleasesAreTheRunsOwn) {
  const Emulated emulated([](std::int64_t, int layer) { return layer == 8 ? 2.4e-3 : 0.3e-3; });
  TempFolder folder;
  const std::filesystem::path trace = folder.path() / "trace.jsonl";
  PipelineOptions options = options_for(40, 8);
  options.policy.rank_use = control::RankUse::kFewest;
  options.policy.pack_slack = 0.2;
  options.release_after = 3;
  Changing run(emulated, options, {2, 3, 3, 1}, trace);
  const Told told = run.train({{.until = 30, .join = 1}, {.until = 40}}, 5);
  expect_the_same(told, trace, 5, options,
                  {{.step = 0, .leave = {4}}, {.step = 30, .leave = {}, .join = {4}}});
}

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

}  // namespace
}  // namespace dynmo::train
