// SPDX-License-Identifier: Apache-2.0
// A rank that does not get the exchange of a step finishes the step with that of another rank.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>

#include "dynmo/transport/gather.h"
#include "tests/runtime/named_sources.h"

namespace dynmo::runtime::testing {
namespace {

using transport::Transport;

Exchange some_exchange() {
  Exchange exchanged;
  exchanged.layers.resize(2);
  exchanged.layers[0].time = {1, 2, 3};
  exchanged.layers[0].update_s = 4;
  exchanged.layers[0].stash_bytes = Bytes{5};
  exchanged.layers[1].boundary_bytes = Bytes{6};
  exchanged.squared_norms = {0.25, std::numeric_limits<double>::infinity()};
  exchanged.figures = {{1, 2}, {}};
  exchanged.losses = {3.5, 4.5};
  exchanged.rows = {7, 8};
  exchanged.busy_s = {0.5, 0.25, 0.125};
  exchanged.stats.overhead.overhead_s = 1.5;
  exchanged.stats.overhead.message_s = 2.5;
  exchanged.stats.plan_s = 9;
  exchanged.stats.migrate_s = 10;
  exchanged.asked = true;
  exchanged.refused = 11;
  return exchanged;
}

TEST(UnfinishedStep, AnExchangeIsReadAsItWasWritten) {
  Exchange exchanged = some_exchange();
  const auto read = parse_exchange(pack(exchanged));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, exchanged);
  exchanged.losses.front() = std::nan("");
  const auto with_nan = parse_exchange(pack(exchanged));
  ASSERT_TRUE(with_nan) << with_nan.error().message;
  EXPECT_EQ(pack(*with_nan), pack(exchanged));
}

TEST(UnfinishedStep, OtherBytesAreRefused) {
  const std::string bytes = pack(some_exchange());
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(parse_exchange(std::string_view(bytes).substr(0, length))) << length;
  }
  EXPECT_FALSE(parse_exchange(bytes + "x"));
  Rng rng(3);
  for (int i = 0; i < 2000; ++i) {
    std::string changed = bytes;
    changed[rng.below(changed.size())] = static_cast<char>(rng.below(256));
    (void)parse_exchange(changed);  // reads no memory that is not its own
  }
}

// Steps in which every rank but 0 finishes with what rank 0 has got, the last of them when the
// group is gone.
RunResult finished_from_rank_0(const RunOptions& run, int ranks, Rng& rng) {
  const model::LlamaConfig config = small_model();
  const model::Model layers = model::in_precision(run.layers, run.precision);
  const plan::Plan plan =
      plan::make_plan(random_cut(rng, kLayers, ranks), schedule::ScheduleKind::k1F1B);
  const PipelineOptions options = pipeline_options(config, run);
  const auto batches = [&](std::int64_t step, MicroBatchId id) {
    return batch(config, run.seed, step, id);
  };
  RunResult result;
  std::mutex mutex;
  result.status = transport::run_ranks(ranks, [&](Transport& inner) -> Expected<void> {
    at::set_num_threads(1);
    auto group = transport::with_faults(inner, std::vector<transport::Fault>());
    Begin begin;
    if (run.begin) {
      DYNMO_ASSIGN(begin, run.begin(layers, plan, Rank(inner.rank().value)));
    } else {
      begin.states = initial_states(layers, plan, Rank(inner.rank().value), run.seed);
    }
    Pipeline pipeline(*group, layers, options, {plan, std::move(begin.states)});
    for (int step = 0; step < run.steps; ++step) {
      EXPECT_FALSE(pipeline.gradients_complete());
      DYNMO_TRY(pipeline.begin_step(batches));
      EXPECT_TRUE(pipeline.gradients_complete());
      DYNMO_ASSIGN(const Exchange mine, pipeline.exchange_figures());
      DYNMO_ASSIGN(const auto all, transport::gather_texts(
                                       *group, transport::control_tag(transport::Control::kUser),
                                       inner.rank() == transport::Member(0) ? pack(mine) : ""));
      if (step + 1 == run.steps) group.reset();
      DYNMO_ASSIGN(const Exchange theirs, parse_exchange(all.front()));
      EXPECT_EQ(theirs, mine);
      DYNMO_ASSIGN(const StepReport report, pipeline.finish_step(theirs));
      EXPECT_EQ(*pipeline.state().last_exchange, theirs);
      EXPECT_EQ(pipeline.next_step(), step + 1);
      if (inner.rank() != transport::Member(0)) continue;
      result.losses.push_back(report.loss);
      result.gradient_norms.push_back(report.gradient_norm);
    }
    const std::lock_guard lock(mutex);
    for (const auto& [id, state] : pipeline.take_state().layers) {
      result.states[id.value] = model::digest(state).hex();
    }
    return {};
  });
  return result;
}

TEST(UnfinishedStep, EndsAsItWouldHaveFromAnotherRanksExchange) {
  const char* given = std::getenv("DYNMO_SEED");
  const std::uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  Rng rng(seed);
  for (int i = 0; i < 6; ++i) {
    const NamedSources& sources = kSources[rng.below(kSources.size())];
    model::LlamaConfig config = small_model();
    config.shape.blocks = sources.blocks;
    RunOptions run{.steps = 16, .micro_batches = 2, .cut = {kLayers}};
    run.make_sources = [make = sources.make](std::int64_t) { return make(/*steps=*/16); };
    run.imported = sources.imported;
    if (sources.imported) run.begin = unlike_matrices;
    run.layers = shaped(model::make_llama(config), run.make_sources);
    if (i % 2 == 1) run.precision = cost::Precision::kBf16;
    const int ranks = 2 + static_cast<int>(rng.below(3));
    const RunResult alone = run_pipeline(run);
    const RunResult other = finished_from_rank_0(run, ranks, rng);
    const std::string what = fmt::format("seed {}: {} on {} ranks", seed, sources.name, ranks);
    ASSERT_TRUE(alone.status) << what << ": " << alone.status.error().message;
    ASSERT_TRUE(other.status) << what << ": " << other.status.error().message;
    EXPECT_EQ(other.losses, alone.losses) << what;
    EXPECT_EQ(other.gradient_norms, alone.gradient_norms) << what;
    EXPECT_EQ(other.states, alone.states) << what;
  }
}

TEST(UnfinishedStep, TheExchangeOfAnotherModelIsRefused) {
  RunOptions run{.steps = 1, .micro_batches = 2, .cut = {kLayers}};
  run.before_step = [&](Pipeline& pipeline, std::int64_t) -> Expected<void> {
    DYNMO_TRY(pipeline.begin_step(
        [&](std::int64_t step, MicroBatchId id) { return batch(small_model(), 7, step, id); }));
    const auto refused = pipeline.finish_step(some_exchange());
    EXPECT_FALSE(refused);
    EXPECT_TRUE(pipeline.gradients_complete());
    return {};
  };
  const RunResult result = run_pipeline(run);
  EXPECT_TRUE(result.status) << result.status.error().message;
}

}  // namespace
}  // namespace dynmo::runtime::testing
