// SPDX-License-Identifier: Apache-2.0
// Early exit in training: thresholds that follow the schedule, what a run says and remembers, what
// goes over the wire.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "dynmo/dynamism/early_exit/load.h"
#include "dynmo/dynamism/early_exit/training/exit_layer.h"
#include "dynmo/dynamism/training/sources.h"
#include "dynmo/transport/traffic.h"
#include "tests/dynamism/shapes.h"
#include "tests/runtime/blinking_source.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime::testing {
namespace {

using dynamism::EarlyExitOptions;

EarlyExitOptions soon() {
  EarlyExitOptions options;
  options.survivors = 0.3;
  options.exit_every = 1;
  options.warm_up = 3;
  options.ramp_steps = 4;
  return options;
}

dynamism::MakeSources exits(const EarlyExitOptions& options) {
  return [options](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_early_exit_source(options));
    return sources;
  };
}

model::Model with_exits(const model::LlamaConfig& config, const EarlyExitOptions& options) {
  model::Recipe recipe = model::decoder_recipe(model::make_llama(config));
  EXPECT_TRUE(dynamism::make_early_exit_source(options)->shape(recipe));
  return model::layers_of(std::move(recipe));
}

RunOptions exit_run(const EarlyExitOptions& options) {
  RunOptions run{.steps = 30, .cut = {kLayers}};
  run.layers = with_exits(small_model(), options);
  run.make_sources = exits(options);
  run.row_room = options.row_room;
  return run;
}

TEST(EarlyExitRun, ThatNeverLetsGoAndTeachesNothingIsThePlainOne) {
  RunOptions plain{.steps = 30, .cut = {3, 5}};
  const RunResult dense = run_pipeline(plain);
  EarlyExitOptions options = soon();
  options.exit_loss = 0;
  for (const double threshold : {1.0, 0.0}) {
    options.threshold = threshold;
    if (threshold == 0) options.warm_up = 1000;
    RunOptions run = exit_run(options);
    run.cut = {3, 5};
    const RunResult result = run_pipeline(run);
    ASSERT_TRUE(result.status) << result.status.error().message;
    EXPECT_EQ(result.losses, dense.losses);
    EXPECT_EQ(result.gradient_norms, dense.gradient_norms);
    for (const int layer : {0, 1, 3, 5, 6, 7}) {
      EXPECT_EQ(result.states.at(layer), dense.states.at(layer)) << layer;
    }
  }
}

dynamism::MakeSources experts_and_exits(const dynamism::MoeOptions& moe,
                                        const EarlyExitOptions& early_exit) {
  return [=](std::int64_t) {
    dynamism::Sources sources;
    sources.push_back(dynamism::make_moe_source(moe));
    sources.push_back(dynamism::make_early_exit_source(early_exit));
    return sources;
  };
}

dynamism::MoeOptions four_experts(int router) {
  dynamism::MoeOptions moe;
  moe.experts = 4;
  moe.router = static_cast<dynamism::MoeRouter>(router);
  moe.capacity_factor = 1.1;
  return moe;
}

RunOptions experts_run(const dynamism::MakeSources& sources) {
  RunOptions run{.steps = 30, .cut = {3, 5}, .make_sources = sources};
  run.layers = shaped(model::make_llama(small_model()), sources);
  return run;
}

TEST(EarlyExitRun, OfExpertsThatNeverLetsGoIsThatOfExperts) {
  EarlyExitOptions never = soon();
  never.exit_loss = 0;
  never.threshold = 1;
  for (int router = 0; router < 5; ++router) {
    const dynamism::MoeOptions moe = four_experts(router);
    const RunResult plain = run_pipeline(experts_run([moe](std::int64_t) {
      dynamism::Sources sources;
      sources.push_back(dynamism::make_moe_source(moe));
      return sources;
    }));
    const RunResult result = run_pipeline(experts_run(experts_and_exits(moe, never)));
    ASSERT_TRUE(result.status) << result.status.error().message;
    EXPECT_EQ(result.losses, plain.losses) << "router " << router;
    EXPECT_EQ(result.gradient_norms, plain.gradient_norms);
    for (const int layer : {0, 1, 3, 5, 6, 7}) {
      EXPECT_EQ(result.states.at(layer), plain.states.at(layer)) << layer;
    }
  }
}

// At the first exit all, behind the last what stays.
TEST(EarlyExitRun, OfExpertsGivesThemTheTokensThatCame) {
  dynamism::MoeOptions moe;
  moe.experts = 4;
  moe.capacity_factor = 0.7;
  RunOptions run = experts_run(experts_and_exits(moe, soon()));
  run.steps = 40;
  run.cut = {2, 3, 3};
  int behind_exits = 0;
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step == 0 || pipeline.grid().position() != Rank(0)) return {};
    const Json figures = dynamism::figures(pipeline.sources());
    const auto left = figures["early_exit"]["left"].get<std::vector<double>>();
    double came = 4 * 24;
    for (std::size_t block = 0; block < 3; ++block) {
      const auto counts = figures["moe"]["counts"][block].get<std::vector<double>>();
      const double given = std::accumulate(counts.begin(), counts.end(), 0.0);
      EXPECT_EQ(given, 2 * came) << "step " << step << ", block " << block;
      // Capacities are shares of the tokens of a micro-batch that came, rounded up.
      const double kept = given - figures["moe"]["dropped"][block].get<double>();
      EXPECT_LE(kept, 0.7 * 2 * came + 4 * 4);
      if (came < 4 * 24) ++behind_exits;
      came -= left[block];
    }
    EXPECT_EQ(came, 0);
    return {};
  };
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status) << result.status.error().message;
  EXPECT_GT(behind_exits, 40);
}

TEST(EarlyExitRun, OfExpertsGoesOnWhenAllTokensLeaveAtTheFirstExit) {
  EarlyExitOptions options = soon();
  options.threshold = 1e-12;
  options.warm_up = 2;
  for (int router = 0; router < 5; ++router) {
    const dynamism::MoeOptions moe = four_experts(router);
    RunOptions run = experts_run(experts_and_exits(moe, options));
    run.steps = 8;
    run.cut = {2, 2, 2, 2};
    run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      if (step < 4) return {};
      const Json found = dynamism::figures(pipeline.sources())["moe"];
      EXPECT_EQ(found["counts"][2], (Json{0.0, 0.0, 0.0, 0.0}));
      EXPECT_EQ(found["aux_loss"][2], 0.0);
      EXPECT_EQ(found["straggler_factor"]["4"][2], 1.0);
      return {};
    };
    const RunResult result = run_pipeline(run);
    ASSERT_TRUE(result.status) << result.status.error().message;
    for (const double loss : result.losses) EXPECT_TRUE(std::isfinite(loss));
    run.cut = {kLayers};
    run.before_step = {};
    expect_same(run_pipeline(run), result, "four ranks");
  }
}

TEST(EarlyExitRun, TokensLeaveAsScheduledAndAllAreCounted) {
  for (const dynamism::ExitConfidence confidence :
       {dynamism::ExitConfidence::kGap, dynamism::ExitConfidence::kSimilarity,
        dynamism::ExitConfidence::kClassifier}) {
    EarlyExitOptions options = soon();
    options.confidence = confidence;
    RunOptions run = exit_run(options);
    run.steps = 40;
    run.cut = {2, 3, 3};
    run.micro_batches = 6;
    std::vector<double> stayed;
    run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      if (step == 0 || pipeline.grid().position() != Rank(0)) return {};
      const Json figures = pipeline.sources().front()->figures();
      double tokens = 0;
      for (const auto& left : figures.at("left")) tokens += left.get<double>();
      EXPECT_EQ(tokens, 6 * 24);
      EXPECT_EQ(figures.at("tokens").get<double>(), 6 * 24);
      stayed.push_back(figures.at("survivors").get<double>());
      return {};
    };
    const RunResult result = run_pipeline(run);
    ASSERT_TRUE(result.status) << result.status.error().message;
    EXPECT_EQ(stayed[0], 1);
    EXPECT_EQ(stayed[1], 1);
    EXPECT_EQ(stayed[2], 1);
    double late = 0;
    for (std::size_t i = stayed.size() - 15; i < stayed.size(); ++i) late += stayed[i] / 15;
    EXPECT_NEAR(late, 0.3, 0.12) << static_cast<int>(confidence);
  }
}

TEST(EarlyExitRun, GoesOnWhenAllTokensLeaveAtTheFirstExit) {
  EarlyExitOptions options = soon();
  options.threshold = 1e-12;
  options.warm_up = 2;
  RunOptions run = exit_run(options);
  run.cut = {2, 2, 2, 2};
  bool all_left = false;
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    if (step < 4 || pipeline.grid().position() != Rank(0)) return {};
    const Json left = pipeline.sources().front()->figures().at("left");
    all_left = left[0].get<double>() == 4 * 24 && left[2].get<double>() == 0;
    return {};
  };
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status) << result.status.error().message;
  EXPECT_TRUE(all_left);
  for (const double loss : result.losses) EXPECT_TRUE(std::isfinite(loss));
  run.cut = {kLayers};
  run.before_step = {};
  expect_same(run_pipeline(run), result, "four ranks");
}

// At each boundary, the costs have what was counted; and how much that is beside the rows.
TEST(EarlyExitRun, SendsHardlyMoreThanItsRows) {
  model::LlamaConfig config = small_model();
  config.shape.sequence = 96;
  EarlyExitOptions options = soon();
  options.survivors = 0.2;
  RunOptions run{.steps = 40, .micro_batches = 8, .cut = {3, 2, 3}};
  run.make_sources = exits(options);
  const model::Model layers = with_exits(config, options);
  PipelineOptions own = pipeline_options(config, run);
  own.row_room = options.row_room;
  own.learning_rate.peak = 1e-3;  // thresholds follow slowly
  const plan::Plan plan = plan::make_plan(run.cut, schedule::ScheduleKind::k1F1B);
  const auto status = transport::run_ranks(3, [&](transport::Transport& inner) -> Expected<void> {
    at::set_num_threads(1);
    transport::CountingTransport counting(inner);
    const Rank rank(inner.rank().value);
    Pipeline pipeline(counting, layers, own, {plan, initial_states(layers, plan, rank, 7, {}), 0});
    const int next = rank.value + 1;
    const auto counted = [&] {
      return next < 3 ? counting.sent(transport::Member(next), Purpose::kActivation).bytes.value
                      : 0;
    };
    double rows = 0;
    std::int64_t sent = 0;
    for (int step = 0; step < run.steps; ++step) {
      const std::int64_t before = counted();
      DYNMO_ASSIGN(const StepReport report, pipeline.step([&](std::int64_t s, MicroBatchId id) {
        return batch(config, 7, s, id);
      }));
      if (next == 3) continue;
      // The last layer of this rank's stage: 2, then 4, behind which an exit stands.
      const auto last = static_cast<std::size_t>(rank.value == 0 ? 2 : 4);
      const std::int64_t now = counted() - before;
      EXPECT_NEAR(static_cast<double>(report.layers[last].boundary_bytes.value) * 8,
                  static_cast<double>(now), 8)
          << "step " << step;
      const Json left = pipeline.sources().front()->figures().at("left");
      double passed = 8 * 2 * 96 - left[0].get<double>();
      if (rank.value == 1) passed -= left[1].get<double>();
      rows += passed;
      sent += now;
    }
    if (next < 3) {
      const double ratio = static_cast<double>(sent) / (rows * (4 * 32 + 4));
      ::testing::Test::RecordProperty(fmt::format("bytes_by_rows_{}", rank.value),
                                      fmt::format("{:.4f}", ratio));
      fmt::print("boundary {}: {:.4f} of its rows' bytes\n", rank.value, ratio);
      EXPECT_LE(ratio, 1.15);
    }
    return {};
  });
  ASSERT_TRUE(status) << status.error().message;
}

// The load model, given how many tokens a training's exits let go, against what the layers of the
// training multiplied and sent.
TEST(EarlyExitLoad, IsTheWorkOfEachLayerGivenItsSurvivors) {
  model::LlamaConfig config = small_model();
  config.shape.sequence = 96;
  config.dropout = 0;
  dynamism::LoadInputs inputs{
      .shape = cost::transformer_shape(config.shape, cost::Architecture::kLlama),
      .device = dynamism::arithmetic_device(),
      .micro_batches = 4};
  inputs.shape.micro_batch_size = 2;
  const cost::ModelCost dense = dynamism::dense(inputs);
  for (const auto confidence :
       {dynamism::ExitConfidence::kGap, dynamism::ExitConfidence::kSimilarity,
        dynamism::ExitConfidence::kClassifier}) {
    for (const double exit_loss : {0.0, 0.1}) {
      EarlyExitOptions options = soon();
      options.confidence = confidence;
      options.exit_loss = exit_loss;
      RunOptions run{.steps = 30, .cut = {kLayers}};
      run.make_sources = exits(options);
      const model::Model layers = with_exits(config, options);
      const plan::Plan plan = plan::make_plan(run.cut, schedule::ScheduleKind::k1F1B);
      const auto status =
          transport::run_ranks(1, [&](transport::Transport& transport) -> Expected<void> {
            at::set_num_threads(1);
            PipelineOptions own = pipeline_options(config, run);
            own.learning_rate.peak = 1e-4;  // thresholds follow slowly
            Pipeline pipeline(transport, layers, own,
                              {plan, initial_states(layers, plan, Rank(0), 7, {}), 0});
            StepReport report;
            for (int step = 0; step < run.steps; ++step) {
              DYNMO_ASSIGN(report, pipeline.step([&](std::int64_t s, MicroBatchId id) {
                return batch(config, 7, s, id);
              }));
            }
            const Json figures = pipeline.sources().front()->figures();
            const double tokens = figures.at("tokens").get<double>();
            const double left = figures.at("left")[0].get<double>();
            const double stay = tokens - left;
            const double last = stay - figures.at("left")[1].get<double>();
            EXPECT_LT(last, 0.6 * tokens);
            EXPECT_GT(last, 0);
            DYNMO_ASSIGN(const cost::ModelCost twin,
                         dynamism::early_exit_costs(
                             options, inputs, {1, stay / tokens, last / tokens, last / tokens}));
            const auto work = [&](const cost::LayerCost& c) {
              return c.forward_s + c.backward_input_s + c.backward_weight_s;
            };
            // The second exit: of `stay` rows `last` stay. What its head has seen is a figure.
            const double scored = figures.at("scored")[1].get<double>();
            const bool learns =
                exit_loss > 0 || confidence == dynamism::ExitConfidence::kClassifier;
            const double head = 2.0 * 61 * 32 * (scored + 2 * (learns ? stay : stay - last));
            const double mlp = 3 * 2.0 * 3 * 32 * 48 * stay;
            const double counted = (head + mlp) / 4 / 1e12;
            EXPECT_NEAR(work(twin.layers[4]), counted, 0.2 * counted)
                << static_cast<int>(confidence) << " " << exit_loss;
            for (const std::size_t i : {3U, 5U, 6U}) {
              const double rows = i == 3 ? stay : last;
              EXPECT_NEAR(
                  static_cast<double>(twin.layers[i].boundary_bytes.value) /
                      static_cast<double>(dense.layers[i].boundary_bytes.value),
                  static_cast<double>(report.layers[i].boundary_bytes.value) / (2. * 96 * 32 * 4),
                  0.2 * rows / tokens)
                  << i;
            }
            return {};
          });
      ASSERT_TRUE(status) << status.error().message;
    }
  }
}

TEST(EarlyExitSource, RemembersItsThresholds) {
  EarlyExitOptions options = soon();
  const auto source = dynamism::make_early_exit_source(options);
  EXPECT_TRUE(source->restore(Json{{"thresholds", {0.25, 0.5}}}));
  EXPECT_EQ(source->state().at("thresholds"), (Json{0.25, 0.5}));
  for (const Json& bad :
       {Json::object(), Json{{"thresholds", "none"}}, Json{{"thresholds", {"a"}}}}) {
    const auto refused = source->restore(bad);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
  }
}

TEST(EarlyExitSource, RefusesAModelWithoutABlockToLeaveBehind) {
  EarlyExitOptions options = soon();
  options.exit_every = 3;
  model::Recipe recipe = model::decoder_recipe(model::make_llama(small_model()));
  const auto refused = dynamism::make_early_exit_source(options)->shape(recipe);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBadInput);
  EXPECT_NE(refused.error().message.find("early_exit.exit_every is 3"), std::string::npos);
  model::Recipe none;
  EXPECT_FALSE(dynamism::make_early_exit_source(soon())->shape(none));
}

}  // namespace
}  // namespace dynmo::runtime::testing
