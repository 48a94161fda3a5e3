// SPDX-License-Identifier: Apache-2.0
// A CUDA device against the CPU: layers, updates, pipelines whose ranks share the device,
// migration. Skipped, saying so, where there is none.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <optional>

#include "dynmo/c10d/cuda.h"
#include "dynmo/kernels/device/launcher.h"
#include "dynmo/kernels/operations.h"
#include "dynmo/model/adamw.h"
#include "dynmo/model/decoder.h"
#include "dynmo/model/dropout.h"
#include "dynmo/runtime/device_clock.h"
#include "tests/model/helpers.h"
#include "tests/runtime/pipeline_fixture.h"

namespace dynmo::runtime {
namespace {

using model::testing::random_tensor;
using testing::RunOptions;
using testing::RunResult;

// Opens the device of the calling thread: a CUDA device, or the one that the environment names.
Expected<at::Device> open_device() {
  const at::Device device = dynmo::testing::tested_device();
  return device.is_cpu() ? c10d::open_cuda(0, c10d::Determinism::kDemanded) : device;
}

class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto device = open_device();
    if (!device) GTEST_SKIP() << device.error().message;
    device_ = *device;
  }
  at::Device device_ = at::kCPU;
};

// Distance in units of the largest expected element.
double distance(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_EQ(actual.sizes(), expected.sizes());
  const at::Tensor exact = expected.to(at::kDouble);
  return (actual.to(at::kCPU, at::kDouble) - exact).abs().max().item<double>() /
         (exact.abs().max().item<double>() + 1e-30);
}

struct PassResult {
  double loss = 0;
  std::vector<model::LayerState> states;  // with gradients, on the CPU
};

// One micro-batch forward and backward; head size 16, so that fused attention takes part.
PassResult one_pass(const model::DecoderConfig& config, cost::Precision precision,
                    at::Device device) {
  const model::Model layers = model::in_precision(model::make_decoder(config), precision);
  const cost::DecoderShape& sizes = model::shape_of(config);
  std::vector<model::LayerState> states;
  for (model::LayerState& state : model::testing::make_states(layers, 3)) {
    states.push_back(model::on_device(std::move(state), device));
  }
  model::LayerContext context;
  context.tokens_BT =
      model::testing::random_tokens(2, sizes.sequence, sizes.vocabulary, 8).to(device);
  context.targets_BT =
      model::testing::random_tokens(2, sizes.sequence, sizes.vocabulary, 9).to(device);
  model::testing::Pass pass = model::testing::forward(layers, states, context);
  at::Tensor gradient;
  for (std::size_t i = layers.size(); i-- > 0;) {
    gradient = layers[i]->input_gradient(states[i], *pass.stashes[i], gradient,
                                         model::Layer::InputGradient::kWanted);
    layers[i]->weight_gradient(states[i], *pass.stashes[i]);
  }
  PassResult result{.loss = pass.loss.item<double>(), .states = {}};
  for (model::LayerState& state : states) {
    result.states.push_back(model::on_device(std::move(state), at::kCPU));
  }
  return result;
}

std::vector<model::DecoderConfig> decoders() {
  model::LlamaConfig llama = testing::small_model();
  llama.shape.hidden = 64;
  llama.shape.intermediate = 96;
  llama.shape.sequence = 40;
  model::Gpt2Config gpt2;
  gpt2.shape.vocabulary = 61;
  gpt2.shape.hidden = 64;
  gpt2.shape.blocks = 2;
  gpt2.shape.heads = 4;
  gpt2.shape.sequence = gpt2.shape.positions = 40;
  gpt2.dropout = 0.1;
  // Heads as wide as CUDA's fused attention takes, more rows than a block of threads.
  model::LlamaConfig wide = llama;
  wide.shape.vocabulary = 5003;
  wide.shape.hidden = 256;
  wide.shape.heads = 2;
  wide.shape.kv_heads = 1;
  wide.shape.intermediate = 688;
  wide.shape.sequence = 300;
  return {llama, gpt2, wide};
}

TEST_F(Gpu, HasKernelsOfOurOwn) {
  if (!device_.is_cuda()) GTEST_SKIP() << "the launcher of another device is that of its program";
  EXPECT_EQ(kernels::device::why_no_kernels(device_), "");
}

void expect_like_cpu(const model::DecoderConfig& config, cost::Precision precision,
                     at::Device device) {
  const double tolerance = precision == cost::Precision::kFp32 ? 1e-4 : 0.06;
  const PassResult expected = one_pass(config, precision, at::kCPU);
  const PassResult actual = one_pass(config, precision, device);
  EXPECT_NEAR(actual.loss, expected.loss, tolerance * expected.loss);
  for (std::size_t i = 0; i < actual.states.size(); ++i) {
    for (std::size_t p = 0; p < actual.states[i].parameters.size(); ++p) {
      EXPECT_LT(distance(actual.states[i].parameters[p].gradient,
                         expected.states[i].parameters[p].gradient),
                tolerance)
          << "family " << config.index() << ", layer " << i << ", "
          << actual.states[i].parameters[p].name;
    }
  }
}

TEST_F(Gpu, LayersGiveTheLossAndGradientsOfTheCpu) {
  for (const model::DecoderConfig& config : decoders()) {
    for (const auto precision : {cost::Precision::kFp32, cost::Precision::kBf16}) {
      expect_like_cpu(config, precision, device_);
    }
  }
}

TEST_F(Gpu, LayersWithoutKernelsOfOurOwnGiveTheLossAndGradientsOfTheCpu) {
  kernels::device::use_kernels(false);
  for (const model::DecoderConfig& config : decoders()) {
    expect_like_cpu(config, cost::Precision::kBf16, device_);
  }
  kernels::device::use_kernels(true);
}

TEST_F(Gpu, GivesTheSameBitsTwice) {
  for (const model::DecoderConfig& config : decoders()) {
    for (const auto precision : {cost::Precision::kFp32, cost::Precision::kBf16}) {
      const PassResult first = one_pass(config, precision, device_);
      const PassResult second = one_pass(config, precision, device_);
      EXPECT_EQ(first.loss, second.loss);
      for (std::size_t i = 0; i < first.states.size(); ++i) {
        for (std::size_t p = 0; p < first.states[i].parameters.size(); ++p) {
          EXPECT_TRUE(at::equal(first.states[i].parameters[p].gradient,
                                second.states[i].parameters[p].gradient));
        }
      }
    }
  }
}

TEST_F(Gpu, DropsWhatTheCpuDrops) {
  model::LayerState state;
  state.random_key = 77;
  const at::Tensor like = at::empty({3, 1001});
  const at::Tensor expected = model::dropout_mask(like, 0.3, state, {}, 5);
  const at::Tensor actual = model::dropout_mask(like.to(device_), 0.3, state, {}, 5);
  EXPECT_TRUE(at::equal(actual.cpu(), expected));
}

TEST_F(Gpu, UpdatesAndNormsAreThoseOfTheCpu) {
  const auto layers =
      model::in_precision(model::make_decoder(decoders()[0]), cost::Precision::kBf16);
  model::LayerState host = model::make_state(*layers[1], LayerId(1), 3);
  for (std::size_t p = 0; p < host.parameters.size(); ++p) {
    host.parameters[p].gradient.copy_(random_tensor(host.parameters[p].value.sizes(), p + 1));
  }
  const Staging staging{.device = device_};
  model::LayerState state = staging.to_device(host);
  EXPECT_NEAR(model::squared_norm(state) / model::squared_norm(host), 1, 1e-9);
  for (int step = 0; step < 3; ++step) {
    for (std::size_t p = 0; p < host.parameters.size(); ++p) {
      const at::Tensor gradient = random_tensor(host.parameters[p].value.sizes(), 7 * p + 1);
      host.parameters[p].gradient.copy_(gradient);
      state.parameters[p].gradient.copy_(gradient);
    }
    model::update(host, {.learning_rate = 1e-2}, 0.5);
    model::update(state, {.learning_rate = 1e-2}, 0.5);
  }
  const model::LayerState back = staging.to_host(state);
  for (std::size_t p = 0; p < host.parameters.size(); ++p) {
    EXPECT_LT(distance(back.parameters[p].value, host.parameters[p].value), 1e-5);
    EXPECT_EQ(back.parameters[p].gradient.abs().max().item<double>(), 0);
    EXPECT_TRUE(
        at::equal(back.parameters[p].compute_copy, back.parameters[p].value.to(at::kBFloat16)));
  }
}

TEST_F(Gpu, AClockMeasuresTheDevice) {
  DeviceClock clock(device_);
  const DeviceClock::Mark begin = clock.mark();
  at::Tensor x = at::ones({2048, 2048}, device_);
  for (int i = 0; i < 20; ++i) x = at::mm(x, x).mul_(1.0 / 2048);
  const DeviceClock::Mark end = clock.mark();
  clock.finish();
  const double host_s = std::chrono::duration<double>(end.host - begin.host).count();
  EXPECT_GT(clock.seconds(begin, end), 0);
  EXPECT_GE(clock.seconds(clock.start(), end), clock.seconds(begin, end));
  EXPECT_GE(host_s, 0);
}

// Ranks as threads that share the device, through host memory.
RunOptions on(at::Device device, std::vector<int> cut) {
  RunOptions run{.steps = 10, .cut = std::move(cut)};
  run.staging.device = device;
  run.before_step = [device](Pipeline&, std::int64_t) -> Expected<void> {
    if (!device.is_cpu()) DYNMO_TRY(open_device());  // of this thread
    return {};
  };
  return run;
}

TEST_F(Gpu, RanksThatShareItTrainLikeTheCpu) {
  const RunResult expected = testing::run_pipeline(on(at::kCPU, {8}));
  ASSERT_TRUE(expected.status) << expected.status.error().message;
  std::optional<RunResult> one;
  for (const std::vector<int>& cut :
       {std::vector<int>{8}, std::vector<int>{5, 3}, std::vector<int>{2, 2, 2, 2}}) {
    const RunResult actual = testing::run_pipeline(on(device_, cut));
    ASSERT_TRUE(actual.status) << actual.status.error().message;
    for (std::size_t step = 0; step < expected.losses.size(); ++step) {
      EXPECT_NEAR(actual.losses[step], expected.losses[step], 1e-3) << "step " << step;
    }
    if (!one) one = actual;
    EXPECT_EQ(actual.losses, one->losses) << cut.size() << " ranks";
  }
}

TEST_F(Gpu, ReplicasTrainLikeTheCpu) {
  RunOptions run = on(at::kCPU, {5, 3});
  run.replicas = 2;
  const RunResult expected = testing::run_pipeline(run);
  run = on(device_, {5, 3});
  run.replicas = 2;
  const RunResult actual = testing::run_pipeline(run);
  ASSERT_TRUE(actual.status) << actual.status.error().message;
  EXPECT_EQ(actual.different, 0);
  for (std::size_t step = 0; step < expected.losses.size(); ++step) {
    EXPECT_NEAR(actual.losses[step], expected.losses[step], 1e-3) << "step " << step;
  }
}

TEST_F(Gpu, LayersThatMoveWhileStepsRunAndFreezeChangeNoBit) {
  for (const auto precision : {cost::Precision::kFp32, cost::Precision::kBf16}) {
    RunOptions alone = on(device_, {8});
    alone.steps = 30;
    alone.micro_batches = 6;
    alone.precision = precision;
    alone.freezing = testing::freezing();
    RunOptions moving = alone;
    moving.cut = {3, 2, 3};
    const auto begin_move =
        testing::random_plans(/*seed=*/31, 3, 6, {}, testing::MoveHow::kDuringStep);
    moving.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
      DYNMO_TRY(open_device());
      return begin_move(pipeline, step);
    };
    testing::expect_same(testing::run_pipeline(alone), testing::run_pipeline(moving),
                         precision == cost::Precision::kFp32 ? "fp32" : "bf16");
  }
}

TEST_F(Gpu, MigrationMovesEveryBit) {
  RunOptions run = on(device_, {3, 5});
  std::mutex mutex;
  std::map<int, std::string> before;
  std::map<int, std::string> after;
  run.before_step = [&](Pipeline& pipeline, std::int64_t step) -> Expected<void> {
    DYNMO_TRY(open_device());
    if (step != 4) return {};
    const auto digests = [&](std::map<int, std::string>& all) {
      const std::lock_guard lock(mutex);
      for (const auto& [id, state] : pipeline.states()) {
        all[id.value] = model::digest(pipeline.staging().to_host(state)).hex();
      }
    };
    digests(before);
    DYNMO_ASSIGN(const bool moved, pipeline.apply(plan::make_plan(
                                       {6, 2}, schedule::ScheduleKind::k1F1B, /*generation=*/1)));
    EXPECT_TRUE(moved);
    digests(after);
    for (const auto& [id, state] : pipeline.states()) {
      EXPECT_EQ(state.parameters.front().value.device(), device_) << id.value;
    }
    return {};
  };
  const RunResult result = testing::run_pipeline(run);
  ASSERT_TRUE(result.status) << result.status.error().message;
  EXPECT_EQ(before.size(), 8U);
  EXPECT_EQ(before, after);
}

}  // namespace
}  // namespace dynmo::runtime
