// SPDX-License-Identifier: Apache-2.0
#include "dynmo/train/checkpointer.h"

#include <gtest/gtest.h>

#include <fstream>

#include "dynmo/core/files.h"
#include "dynmo/core/rng.h"
#include "dynmo/observe/run_folder.h"
#include "dynmo/schedule/lowering.h"
#include "dynmo/transport/traffic.h"
#include "tests/runtime/blinking_source.h"
#include "tests/runtime/pipeline_fixture.h"
#include "tests/support/temp_folder.h"

namespace dynmo::train {
namespace {

namespace fs = std::filesystem;
using runtime::testing::kKinds;
using runtime::testing::kLayers;
using runtime::testing::random_plan;
using runtime::testing::RunOptions;
using runtime::testing::small_model;

constexpr int kTrainedSteps = 9;
constexpr std::uint64_t kSeed = 7;

TensorName names() {
  return [](LayerId layer, std::string_view parameter) {
    return fmt::format("{}.{}", layer.value, parameter);
  };
}

config::Config config_for(const fs::path& run, bool asynchronous, std::int64_t memory) {
  config::Config config;
  config.run.directory = run.string();
  config.train.steps = kTrainedSteps;
  config.checkpoint.asynchronous = asynchronous;
  config.checkpoint.memory = Bytes{memory};
  return config;
}

struct Outcome {
  std::map<int, std::string> states;  // digests after the last step, by layer
  CheckpointTotals totals;
  std::vector<std::string> notes;
  std::optional<Error> failure;
};

struct Training {
  config::Config config;
  plan::Plan plan;
  int micro_batches = 4;
  bool resume = false;
  std::vector<int> checkpoints = {};          // after these steps
  std::function<void(int step)> before = {};  // rank 0, before each step
  dynamism::MakeSources make_sources = {};
  DataIdentity data = {};
};

// Trains to the end, or from the newest checkpoint to it; ranks are threads.
Outcome train_small(const Training& training) {
  const model::LlamaConfig llama = small_model();
  model::Model layers = model::make_llama(llama);
  if (training.make_sources) {
    layers = runtime::testing::shaped(std::move(layers), training.make_sources);
  }
  RunOptions run;
  run.make_sources = training.make_sources;
  run.steps = kTrainedSteps;
  run.micro_batches = training.micro_batches;
  const runtime::PipelineOptions options = runtime::testing::pipeline_options(llama, run);
  Outcome outcome;
  std::mutex mutex;
  const auto done = transport::run_ranks(
      training.plan.ranks, [&](transport::Transport& transport) -> Expected<void> {
        at::set_num_threads(1);
        std::optional<Restored> restored;
        if (training.resume) {
          DYNMO_ASSIGN(restored, restore(training.config));
        }
        runtime::LayerStates states;
        if (restored) {
          DYNMO_ASSIGN(states, load_states(*restored, layers, training.plan,
                                           Rank(transport.rank().value), names()));
        } else {
          states =
              runtime::initial_states(layers, training.plan, Rank(transport.rank().value), kSeed);
        }
        runtime::Pipeline pipeline(
            transport, layers, options,
            {training.plan, std::move(states), restored ? restored->step : 0});
        if (restored) DYNMO_TRY(dynamism::restore(pipeline.sources(), restored->sources));
        Checkpointer checkpointer(
            transport, transport::control_tag(transport::Control::kCheckpoint),
            training.config.run.directory, training.config, checkpoint_writer(training.config),
            names(), Waiting::kNever, training.data);
        for (auto step = static_cast<int>(pipeline.next_step()); step < kTrainedSteps; ++step) {
          if (training.before && transport.rank() == transport::Member(0)) training.before(step);
          DYNMO_TRY(pipeline.step([&](std::int64_t at, MicroBatchId id) {
            return runtime::testing::batch(llama, kSeed, at, id);
          }));
          DYNMO_TRY(checkpointer.poll());
          if (std::ranges::count(training.checkpoints, step + 1) > 0)
            DYNMO_TRY(checkpointer.start(pipeline));
        }
        DYNMO_TRY(checkpointer.finish());
        EXPECT_FALSE(checkpointer.active());
        const std::lock_guard lock(mutex);
        for (const auto& [id, state] : pipeline.states()) {
          outcome.states[id.value] = model::digest(run.staging.to_host(state)).hex();
        }
        if (transport.rank() != transport::Member(0)) return {};
        outcome.totals = checkpointer.totals();
        outcome.notes = checkpointer.take_notes();
        outcome.failure = checkpointer.failure();
        return {};
      });
  EXPECT_TRUE(done.has_value()) << done.error().message;
  return outcome;
}

std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    found[entry.path().filename()] = *read_file(entry.path());
  }
  return found;
}

plan::Plan three_ranks() { return plan::make_plan({2, 3, 3}, schedule::ScheduleKind::k1F1B); }

TEST(Checkpointer, WritesTheBytesOfTheSynchronousWriteWhileTrainingGoesOn) {
  const TempFolder folder;
  const Training synchronous{.config = config_for(folder.path() / "sync", false, 0),
                             .plan = three_ranks(),
                             .checkpoints = {3, 6, 9}};
  const Outcome reference = train_small(synchronous);
  EXPECT_EQ(reference.totals.written, 3);
  // All of it copied; some of it; nothing.
  for (const std::int64_t memory : {std::int64_t{1} << 30, std::int64_t{150000}, std::int64_t{0}}) {
    SCOPED_TRACE(fmt::format("memory {}", memory));
    Training training = synchronous;
    training.config = config_for(folder.path() / fmt::format("{}", memory), true, memory);
    const Outcome outcome = train_small(training);
    EXPECT_EQ(outcome.states, reference.states);
    EXPECT_EQ(outcome.totals.written, 3);
    EXPECT_EQ(outcome.totals.failed, 0);
    EXPECT_TRUE(outcome.notes.empty());
    for (const std::int64_t step : {6, 9}) {
      const auto path = checkpoint::step_folder(
          observe::RunFolder(training.config.run.directory).checkpoints(), step);
      ASSERT_TRUE(checkpoint::verify(path));
      const auto files = contents(path);
      EXPECT_EQ(files.size(), static_cast<std::size_t>(kLayers));
      EXPECT_EQ(files, contents(checkpoint::step_folder(folder.path() / "sync/checkpoints", step)));
    }
    EXPECT_FALSE(fs::exists(checkpoint::step_folder(
        observe::RunFolder(training.config.run.directory).checkpoints(), 3)))
        << "checkpoint.keep is 2";
  }
}

TEST(Checkpointer, OtherDataThanItWasTrainedOnAreNamed) {
  const TempFolder folder;
  const Training training{.config = config_for(folder.path(), false, 0),
                          .plan = three_ranks(),
                          .checkpoints = {kTrainedSteps},
                          .data = {.tokenizer = "bytes", .digest = "d1"}};
  train_small(training);
  const auto restored = restore(training.config);
  ASSERT_TRUE(restored) << restored.error().message;
  // Nothing unknown is said to differ.
  for (const DataIdentity& same :
       {training.data, DataIdentity{}, {.tokenizer = "bytes"}, {.digest = "9 tokens"}}) {
    EXPECT_EQ(changed_data(*restored, same, "here"), "");
  }
  EXPECT_EQ(changed_data(*restored, {.tokenizer = "bytes", .digest = "d2"}, "here"),
            "data     'here' holds other tokens than the 9 steps before were trained on: give "
            "those by data.path to continue as before");
  EXPECT_NE(changed_data(*restored, {.tokenizer = "abc", .digest = "d1"}, "here")
                .find("'here' holds other tokens than the 9 steps before were trained on, of "
                      "another tokenizer"),
            std::string::npos);
}

TEST(Checkpointer, TrainingGoesOnWhereADiskSaysNoAndTheNextOneIsTried) {
  const TempFolder folder;
  Training training{.config = config_for(folder.path(), true, 1 << 30),
                    .plan = three_ranks(),
                    .checkpoints = {2, 4, 6, 8}};
  const Outcome undisturbed =
      train_small({.config = config_for(folder.path() / "other", true, 0), .plan = three_ranks()});
  // A file where the folder should be, from before the first step to the second checkpoint; then,
  // beside a good one, where the folder of the third is renamed to.
  const fs::path root = observe::RunFolder(folder.path()).checkpoints();
  const fs::path third = checkpoint::step_folder(root, 6);
  std::ofstream(root) << "in the way";
  training.before = [&](int step) {
    if (step == 3) fs::remove(root);
    if (step == 5) std::ofstream(third) << "in the way";
  };
  const Outcome outcome = train_small(training);
  EXPECT_EQ(outcome.states, undisturbed.states);
  EXPECT_EQ(outcome.totals.written, 2);
  EXPECT_EQ(outcome.totals.failed, 2);
  EXPECT_FALSE(outcome.failure.has_value()) << "the newest attempt went well";
  ASSERT_EQ(outcome.notes.size(), 2U);
  EXPECT_NE(outcome.notes[0].find("no checkpoint of step 2: rank 0: cannot make folder '" +
                                  root.string()),
            std::string::npos)
      << outcome.notes[0];
  EXPECT_NE(outcome.notes[0].find("no good one yet"), std::string::npos) << outcome.notes[0];
  EXPECT_NE(outcome.notes[1].find("no checkpoint of step 6: rank 0: cannot commit"),
            std::string::npos)
      << outcome.notes[1];
  EXPECT_NE(outcome.notes[1].find("still good: " + checkpoint::step_folder(root, 4).string()),
            std::string::npos)
      << outcome.notes[1];
  std::vector<Error> skipped;
  const auto newest = checkpoint::newest_verified(root, &skipped);
  ASSERT_TRUE(newest);
  EXPECT_EQ(newest->manifest.step, 8);
  for (const auto& entry : fs::directory_iterator(root)) {
    EXPECT_NE(entry.path().extension(), ".tmp") << "a failed one leaves room";
  }
}

TEST(Checkpointer, AnyPlanLoadsWhatAnyOtherSavedAndGoesOnWithTheSameBits) {
  const TempFolder folder;
  using schedule::ScheduleKind;
  constexpr int kMicroBatches = 12;  // what interleaved takes of 1 to 4 ranks
  const Outcome undisturbed =
      train_small({.config = config_for(folder.path() / "whole", true, 1 << 30),
                   .plan = plan::make_plan({kLayers}, ScheduleKind::k1F1B),
                   .micro_batches = kMicroBatches});
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Rng rng(mix_key({0x10ad, seed}));
    const auto draw = [&](std::size_t count) { return static_cast<int>(rng.below(count)); };
    const int saves = 1 + draw(4);
    int loads = 1 + draw(4);
    if (loads == saves) loads = 1 + saves % 4;
    const plan::Plan from = random_plan(rng, kKinds[static_cast<std::size_t>(draw(kKinds.size()))],
                                        kLayers, saves, kMicroBatches);
    const plan::Plan to = random_plan(rng, kKinds[static_cast<std::size_t>(draw(kKinds.size()))],
                                      kLayers, loads, kMicroBatches);
    SCOPED_TRACE(fmt::format("seed {}: {} {} to {} {}", seed, schedule::name(from.schedule),
                             plan::to_string(from), schedule::name(to.schedule),
                             plan::to_string(to)));
    Training training{.config = config_for(folder.path() / fmt::format("{}", seed), true,
                                           static_cast<std::int64_t>(rng.below(400000))),
                      .plan = from,
                      .micro_batches = kMicroBatches,
                      .checkpoints = {1 + draw(kTrainedSteps - 1)}};
    EXPECT_EQ(train_small(training).states, undisturbed.states);
    training.plan = to;
    training.resume = true;
    training.checkpoints.clear();
    EXPECT_EQ(train_small(training).states, undisturbed.states);
  }
}

TEST(Checkpointer, AnAdaptivePlanIsReadBackWithItsOrder) {
  const TempFolder folder;
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Rng rng(mix_key({0xada, seed}));
    Training training{.config = config_for(folder.path() / fmt::format("{}", seed), false, 0),
                      .plan = random_plan(rng, schedule::ScheduleKind::kAdaptive, kLayers, 3, 4,
                                          /*generation=*/2),
                      .checkpoints = {5}};
    const Outcome whole = train_small(training);
    const auto restored = restore(training.config);
    ASSERT_TRUE(restored.has_value()) << restored.error().message;
    EXPECT_EQ(restored->plan, training.plan);
    training.plan = restored->plan;
    training.resume = true;
    training.checkpoints.clear();
    EXPECT_EQ(train_small(training).states, whole.states);
  }
}

// The buffers of these layers say in which micro-batches they are on.
TEST(Checkpointer, SourcesGoOnWithTheirBuffersAndTheirState) {
  const TempFolder folder;
  Training training{.config = config_for(folder.path() / "whole", false, 1 << 30),
                    .plan = plan::make_plan({kLayers}, schedule::ScheduleKind::k1F1B),
                    .checkpoints = {4},
                    .make_sources = runtime::testing::blinking_sources};
  const Outcome whole = train_small(training);
  training.plan = three_ranks();
  training.resume = true;
  training.checkpoints.clear();
  EXPECT_EQ(train_small(training).states, whole.states);
  const auto restored = restore(training.config);
  ASSERT_TRUE(restored.has_value()) << restored.error().message;
  EXPECT_EQ(restored->sources, (Json{{"blinking", 4}}));
}

// The channels of a schedule carry what its sends say, and nothing else.
TEST(Traffic, OfAStepIsWhatScheduleAndPlanSay) {
  using schedule::ActionKind;
  using schedule::ScheduleKind;
  const model::LlamaConfig llama = small_model();
  const model::Model layers = model::make_llama(llama);
  constexpr int kMicroBatches = 6;
  for (const auto kind : {ScheduleKind::k1F1B, ScheduleKind::kZbV, ScheduleKind::kInterleaved,
                          ScheduleKind::kAdaptive}) {
    SCOPED_TRACE(schedule::name(kind));
    Rng rng(9);
    const plan::Plan plan = random_plan(rng, kind, kLayers, 3, kMicroBatches);
    RunOptions run;
    run.steps = 2;
    run.micro_batches = kMicroBatches;
    const auto options = runtime::testing::pipeline_options(llama, run);
    const Bytes boundary{static_cast<std::int64_t>(sizeof(float)) * 2 * llama.shape.sequence *
                         llama.shape.hidden};
    std::vector<TrafficRow> expected;
    const schedule::Schedule lowered =
        schedule::lower(*plan::schedule_of(plan, kMicroBatches, /*frozen_layers=*/0));
    for (const auto& actions : lowered.ranks) {
      for (const schedule::Action& action : actions) {
        const bool activation = action.kind == ActionKind::kSendActivation;
        if (!activation && action.kind != ActionKind::kSendGradient) continue;
        const auto rank_of = [&](StageId stage) {
          return WorldRank(plan.stages[stage.index()].rank.value);
        };
        expected.push_back({rank_of(action.stage),
                            rank_of(schedule::peer(action).stage),
                            activation ? Purpose::kActivation : Purpose::kGradient,
                            {1, boundary}});
      }
    }
    const auto done = transport::run_ranks(3, [&](transport::Transport& inner) -> Expected<void> {
      at::set_num_threads(1);
      transport::CountingTransport transport(inner);
      runtime::Pipeline pipeline(
          transport, layers, options,
          {plan, runtime::initial_states(layers, plan, Rank(transport.rank().value), kSeed)});
      DYNMO_TRY(pipeline.accumulate([&](std::int64_t at, MicroBatchId id) {
        return runtime::testing::batch(llama, kSeed, at, id);
      }));
      DYNMO_ASSIGN(
          const TrafficRows all,
          transport::gather_rows(transport, transport::control_tag(transport::Control::kTraffic),
                                 transport.row()));
      EXPECT_EQ(all, sums_of(expected));
      return {};
    });
    EXPECT_TRUE(done.has_value()) << done.error().message;
  }
}

}  // namespace
}  // namespace dynmo::train
