// SPDX-License-Identifier: Apache-2.0
#include "dynmo/dynamism/training/source.h"

#include <gtest/gtest.h>

#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "blinking_source.h"
#include "pipeline_fixture.h"

// The source of examples/custom_source.cpp, which is built into this program.
dynmo::dynamism::Sources layer_drop(std::int64_t steps);

namespace dynmo::runtime {
namespace {

using namespace testing;

constexpr int kSteps = 15;
constexpr int kMicroBatches = 12;  // what interleaved takes of 1 to 3 ranks

RunOptions with(const dynamism::MakeSources& make_sources, std::vector<int> cut) {
  RunOptions run{.steps = kSteps, .micro_batches = kMicroBatches, .cut = std::move(cut)};
  run.layers = shaped(model::make_llama(small_model()), make_sources);
  run.make_sources = make_sources;
  return run;
}

struct Named {
  std::string name;
  dynamism::MakeSources make_sources;
};

class UsersSources : public ::testing::TestWithParam<Named> {};

TEST_P(UsersSources, GiveTheSameBitsOnOneToThreeRanksAndWhileLayersMove) {
  const auto& [name, make_sources] = GetParam();
  const RunResult single = run_pipeline(with(make_sources, {kLayers}));
  const RunResult plain =
      run_pipeline({.steps = kSteps, .micro_batches = kMicroBatches, .cut = {kLayers}});
  EXPECT_NE(single.losses, plain.losses) << "the source does something";
  for (const std::vector<int>& cut : {std::vector{3, 5}, std::vector{3, 2, 3}}) {
    RunOptions run = with(make_sources, cut);
    const std::string what = fmt::format("{} on {} ranks", name, cut.size());
    expect_same(single, run_pipeline(run), what);
    run.before_step = random_plans(31, static_cast<int>(cut.size()), run.micro_batches);
    expect_same(single, run_pipeline(run), what + ", moving");
  }
}

INSTANTIATE_TEST_SUITE_P(All, UsersSources,
                         ::testing::Values(Named{"blinking", blinking_sources},
                                           Named{"layer_drop", layer_drop}),
                         [](const auto& c) { return c.param.name; });

// The comparison above notices a buffer that stays behind.
TEST(Buffers, OneThatIsWithheldShows) {
  const RunResult still = run_pipeline(with(blinking_sources, {3, 5}));
  for (const std::size_t buffer : {0U, 1U}) {
    RunOptions run = with(blinking_sources, {3, 5});
    run.before_step = [=](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      if (step != 10) return {};
      DYNMO_TRY(pipeline.apply(plan::make_plan({5, 3}, schedule::ScheduleKind::k1F1B, 1)));
      const auto moved = pipeline.states().find(LayerId(3));
      if (moved == pipeline.states().end()) return {};
      const auto spec = pipeline.model()[3]->buffers()[buffer];
      moved->second.buffers[buffer].value.fill_(spec.initial);
      return {};
    };
    const RunResult moving = run_pipeline(run);
    ASSERT_TRUE(moving.status.has_value()) << moving.status.error().message;
    EXPECT_NE(still.losses, moving.losses) << "buffer " << buffer;
  }
}

TEST(Buffers, AreAmongTheBytesThatThePlannerKnows) {
  RunOptions run = with(blinking_sources, {3, 5});
  run.before_step = [](Pipeline& pipeline, std::int64_t) -> Expected<void> {
    for (const auto& [id, state] : pipeline.states()) {
      const cost::LayerCost& known = pipeline.profiler().known().layers[id.index()];
      EXPECT_EQ(known.parameter_bytes + known.optimizer_bytes, model::tensor_bytes(state))
          << "layer " << id.value;
    }
    return {};
  };
  run.steps = 1;
  const RunResult result = run_pipeline(run);
  ASSERT_TRUE(result.status.has_value()) << result.status.error().message;
}

// Sums up each layer's outputs, in every third step, of the micro-batch that a probe runs.
class ProbingSource final : public dynamism::Source {
 public:
  struct Summed final : model::ForwardingLayer {
    Summed(std::shared_ptr<const model::Layer> layer, std::vector<double>& found)
        : ForwardingLayer(std::move(layer)), sums(found) {}
    model::Output forward(const model::LayerState& state, const model::Hidden& input,
                          const model::LayerContext& context,
                          std::unique_ptr<model::Stash>* stash) const override {
      EXPECT_EQ(context.pass, model::Pass::kValidation);
      model::Output output = inner().forward(state, input, context, stash);
      const at::Tensor& made = output.hidden.x.defined() ? output.hidden.x : output.loss;
      sums.at(static_cast<std::size_t>(context.micro_batch.value) * kLayers + state.id.index()) =
          made.sum().item<double>();
      return output;
    }
    std::vector<double>& sums;
  };
  explicit ProbingSource(std::map<std::int64_t, std::vector<std::int64_t>>& found)
      : found_(found) {}
  std::string_view name() const override { return "probing"; }
  Expected<dynamism::Change> before_step(const dynamism::Boundary& now) override {
    if (now.step % 3 != 1) return dynamism::Change{};
    constexpr std::size_t kTimes = 2;
    std::vector<double> sums(kTimes * kLayers, 0);
    model::Model layers = now.model;
    for (auto& layer : layers) layer = std::make_shared<Summed>(layer, sums);
    DYNMO_TRY(now.probe(layers, kTimes));
    std::vector<std::int64_t> bits;
    for (const double sum : sums) bits.push_back(std::bit_cast<std::int64_t>(sum));
    DYNMO_ASSIGN(bits, now.sum(std::move(bits)));
    const std::lock_guard lock(mutex_);
    const auto [known, fresh] = found_.try_emplace(now.step, bits);
    EXPECT_EQ(known->second, bits) << "all ranks know the same";
    return dynamism::Change{};
  }

 private:
  std::map<std::int64_t, std::vector<std::int64_t>>& found_;
  static std::mutex mutex_;
};
std::mutex ProbingSource::mutex_;

TEST(Probe, GivesTheSameOnAnyRanksAndChangesNothing) {
  std::map<std::int64_t, std::vector<std::int64_t>> single;
  const auto probed = [](std::vector<int> cut,
                         std::map<std::int64_t, std::vector<std::int64_t>>& found) {
    RunOptions run{.steps = kSteps, .micro_batches = kMicroBatches, .cut = std::move(cut)};
    run.make_sources = [&found](std::int64_t) {
      dynamism::Sources sources;
      sources.push_back(std::make_unique<ProbingSource>(found));
      return sources;
    };
    return run;
  };
  const RunResult plain =
      run_pipeline({.steps = kSteps, .micro_batches = kMicroBatches, .cut = {kLayers}});
  expect_same(plain, run_pipeline(probed({kLayers}, single)), "one rank");
  EXPECT_EQ(std::ssize(single), 5);
  for (const auto& [step, bits] : single) {
    for (std::size_t i = 0; i < kLayers; ++i) {
      EXPECT_EQ(bits[i], bits[kLayers + i]) << "the same micro-batch twice, step " << step;
      EXPECT_NE(bits[i], 0) << "layer " << i;
    }
  }
  EXPECT_NE(single.at(1), single.at(4)) << "of layers that train";
  for (const std::vector<int>& cut : {std::vector{3, 5}, std::vector{3, 2, 3}}) {
    std::map<std::int64_t, std::vector<std::int64_t>> found;
    RunOptions run = probed(cut, found);
    run.before_step = random_plans(37, static_cast<int>(cut.size()), run.micro_batches);
    expect_same(plain, run_pipeline(run), fmt::format("{} ranks", cut.size()));
    EXPECT_EQ(found, single) << cut.size() << " ranks";
  }
}

TEST(Sources, ThoseOfARunSpeakAsOne) {
  class Fixed final : public dynamism::Source {
   public:
    Fixed(std::string_view name, dynamism::Change change, Json state)
        : name_(name), change_(change), state_(std::move(state)) {}
    std::string_view name() const override { return name_; }
    Expected<dynamism::Change> before_step(const dynamism::Boundary&) override { return change_; }
    Json state() const override { return state_; }

   private:
    std::string_view name_;
    dynamism::Change change_;
    Json state_;
  };
  dynamism::Sources sources;
  const auto add = [&](auto... arguments) {
    sources.push_back(std::make_unique<Fixed>(arguments...));
  };
  add("quiet", dynamism::Change{}, Json());
  add("short", dynamism::Change{.work = true, .frozen_layers = 2}, Json(70));
  add("long", dynamism::Change{.work = false, .frozen_layers = 3}, Json(50));
  const model::Model model;
  LayerStates states;
  const auto change = dynamism::before_step(sources, {.step = 0, .model = model, .states = states});
  EXPECT_TRUE(change->work);
  EXPECT_EQ(change->frozen_layers, 3);
  EXPECT_EQ(dynamism::state(sources), (Json{{"short", 70}, {"long", 50}}));
  const auto other = dynamism::restore(sources, {{"pruning", 1}});
  ASSERT_FALSE(other.has_value());
  EXPECT_NE(other.error().message.find("'pruning'"), std::string::npos);
}

}  // namespace
}  // namespace dynmo::runtime
