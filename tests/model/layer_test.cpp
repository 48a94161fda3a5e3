// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/layer.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "dynmo/core/check.h"
#include "dynmo/core/rng.h"
#include "dynmo/model/adamw.h"
#include "dynmo/model/autograd_layer.h"
#include "dynmo/model/dropout.h"
#include "dynmo/model/state_bytes.h"
#include "gradients.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

using testing::made_by;
using testing::random_tensor;
using testing::same_bits;

class ThreeCalls : public ::testing::Test {
 protected:
  ThreeCalls() { config_.dropout = 0.2; }
  [[nodiscard]] LayerContext context(int micro_batch = 0) const {
    LayerContext context = testing::random_context(config_.shape, 2, 4);
    context.micro_batch = MicroBatchId{micro_batch};
    return context;
  }

  LlamaConfig config_ = testing::tiny_config();
  at::Tensor x_ = random_tensor({2, 10, 24}, 8, at::kFloat);
  at::Tensor dy_ = random_tensor({2, 10, 24}, 9, at::kFloat);
};

TEST_F(ThreeCalls, ForwardWithoutAStashHasTheSameBits) {
  const Model model = make_llama(config_);
  for (const std::size_t i : {1U, 2U, 5U}) {
    const LayerState state = make_state(*model[i], LayerId{static_cast<int>(i)}, 3);
    std::unique_ptr<Stash> stash;
    const at::Tensor with = made_by(model[i]->forward(state, x_, context(), &stash));
    const at::Tensor without = made_by(model[i]->forward(state, x_, context(), nullptr));
    EXPECT_NE(stash, nullptr);
    EXPECT_TRUE(same_bits(with, without));
    EXPECT_FALSE(with.requires_grad() || without.requires_grad());
    EXPECT_FALSE(state.parameters[0].value.requires_grad());
  }
}

TEST_F(ThreeCalls, WeightGradientsMayComeAllAtTheEnd) {
  const Model model = make_llama(config_);
  std::vector<LayerState> at_once = testing::make_states(model, 3);
  std::vector<LayerState> deferred = testing::make_states(model, 3);
  std::vector<testing::Pass> passes;
  for (int m = 0; m < 3; ++m) {
    testing::backward(model, at_once, context(m));
    passes.push_back(testing::forward(model, deferred, context(m)));
  }
  for (auto& pass : passes) testing::input_gradients(model, deferred, pass);
  for (auto& pass : passes) testing::weight_gradients(model, deferred, pass);
  for (std::size_t i = 0; i < model.size(); ++i) {
    for (std::size_t p = 0; p < at_once[i].parameters.size(); ++p) {
      EXPECT_TRUE(same_bits(at_once[i].parameters[p].gradient, deferred[i].parameters[p].gradient));
    }
  }
}

TEST_F(ThreeCalls, OutOfOrderOrTwiceIsABug) {
  const auto layer = make_llama(config_)[2];
  LayerState state = make_state(*layer, LayerId{2}, 3);
  std::unique_ptr<Stash> stash;
  (void)layer->forward(state, x_, context(), &stash);
  EXPECT_THROW(layer->weight_gradient(state, *stash), CheckFailure);
  (void)layer->input_gradient(state, *stash, dy_, Layer::InputGradient::kWanted);
  EXPECT_THROW((void)layer->input_gradient(state, *stash, dy_, Layer::InputGradient::kWanted),
               CheckFailure);
  layer->weight_gradient(state, *stash);
  EXPECT_THROW(layer->weight_gradient(state, *stash), CheckFailure);
}

TEST_F(ThreeCalls, ThreadsThatShareALayerGetTheSameBits) {
  const Model model = make_llama(config_);
  std::vector<std::vector<LayerState>> states;
  for (int i = 0; i < 2; ++i) states.push_back(testing::make_states(model, 3));
  {
    std::vector<std::jthread> threads;
    for (auto& mine : states) {
      threads.emplace_back([&] {
        at::set_num_threads(1);
        for (int m = 0; m < 5; ++m) testing::backward(model, mine, context(m));
      });
    }
  }
  for (std::size_t i = 0; i < model.size(); ++i) {
    for (std::size_t p = 0; p < states[0][i].parameters.size(); ++p) {
      EXPECT_TRUE(
          same_bits(states[0][i].parameters[p].gradient, states[1][i].parameters[p].gradient));
    }
  }
}

TEST(AutogradLayer, AParameterOrInputItsFunctionIgnoresHasNoGradient) {
  const auto layer = autograd_layer(
      "ignores", {{.name = "used", .shape = {3}, .init_std = 1}, {.name = "idle", .shape = {2}}},
      [](const auto& p, const at::Tensor&, const LayerContext&, const LayerState&) {
        return p[0] * 2;
      });
  LayerState state = make_state(*layer, LayerId{0}, 1);
  std::unique_ptr<Stash> stash;
  (void)layer->forward(state, at::ones({4}), {}, &stash);
  const at::Tensor dx =
      layer->input_gradient(state, *stash, at::ones({3}), Layer::InputGradient::kWanted);
  layer->weight_gradient(state, *stash);
  EXPECT_TRUE(same_bits(dx, at::zeros({4})));
  EXPECT_TRUE(same_bits(state.parameters[0].gradient, at::full({3}, 2.0F)));
  EXPECT_TRUE(same_bits(state.parameters[1].gradient, at::zeros({2})));
}

TEST_F(ThreeCalls, AFrozenLayerPassesGradientsAndKeepsItsValues) {
  const Model model = make_llama(config_);
  std::vector<LayerState> states = testing::make_states(model, 3);
  std::vector<LayerState> free = testing::make_states(model, 3);
  for (const std::size_t i : {0U, 3U}) {
    freeze(states[i]);
    for (const Parameter& p : states[i].parameters) {
      EXPECT_FALSE(p.gradient.defined() || p.first_moment.defined() || p.second_moment.defined());
    }
  }
  const Digest before = digest(states[3]);
  testing::backward(model, states, context());
  testing::backward(model, free, context());
  for (const std::size_t i : {1U, 2U, 4U, 5U}) {
    for (std::size_t p = 0; p < states[i].parameters.size(); ++p) {
      EXPECT_TRUE(same_bits(states[i].parameters[p].gradient, free[i].parameters[p].gradient))
          << "layer " << i << " parameter " << p;
    }
  }
  for (int step = 0; step < 3; ++step) {
    testing::backward(model, states, context(step));
    for (LayerState& state : states) update(state, {});
  }
  EXPECT_EQ(digest(states[3]), before);
  EXPECT_EQ(states[3].optimizer_steps, 0);
  EXPECT_NE(digest(states[4]), digest(free[4]));
  EXPECT_EQ(squared_norm(states[3]), 0);
}

TEST_F(ThreeCalls, UnfreezingTrainsAgainFromFreshMoments) {
  const Model model = make_llama(config_);
  std::vector<LayerState> states = testing::make_states(model, 3);
  testing::backward(model, states, context());
  update(states[1], {});
  freeze(states[1]);
  unfreeze(states[1]);
  EXPECT_EQ(states[1].optimizer_steps, 0);
  EXPECT_TRUE(same_bits(states[1].parameters[1].second_moment, at::zeros({24, 24})));
  const at::Tensor before = states[1].parameters[1].value.clone();
  testing::backward(model, states, context());
  update(states[1], {.learning_rate = 0.01});
  EXPECT_FALSE(same_bits(states[1].parameters[1].value, before));
}

TEST(MakeState, DoesNotDependOnOrderAndDiffersByLayerAndSeed) {
  const Model model = make_llama(testing::tiny_config());
  const LayerState late = make_state(*model[3], LayerId{3}, 7);
  (void)make_state(*model[1], LayerId{1}, 7);
  const LayerState again = make_state(*model[3], LayerId{3}, 7);
  EXPECT_EQ(digest(late), digest(again));
  const auto q = [](const LayerState& s) { return s.parameters[1].value; };
  EXPECT_FALSE(same_bits(q(late), q(make_state(*model[1], LayerId{1}, 7))));
  EXPECT_FALSE(same_bits(q(late), q(make_state(*model[3], LayerId{3}, 8))));
  EXPECT_NE(late.random_key, make_state(*model[1], LayerId{1}, 7).random_key);
  const LayerState mlp = make_state(*model[2], LayerId{2}, 7);
  EXPECT_FALSE(same_bits(mlp.parameters[1].value, mlp.parameters[2].value));
}

TEST(MakeState, ValuesHaveTheSpecifiedMoments) {
  LlamaConfig config;
  const Model model = make_llama(config);
  const LayerState state = make_state(*model[2], LayerId{2}, 7);
  EXPECT_TRUE(same_bits(state.parameters[0].value, at::ones({256})));
  const auto moments = [](const at::Tensor& t) {
    return std::pair(t.mean().item<double>(), t.std().item<double>());
  };
  const auto [up_mean, up_deviation] = moments(state.parameters[2].value);
  EXPECT_NEAR(up_mean, 0, 3e-4);
  EXPECT_NEAR(up_deviation, 0.02, 2e-4);
  const auto [down_mean, down_deviation] = moments(state.parameters[3].value);
  EXPECT_NEAR(down_mean, 0, 1e-4);
  EXPECT_NEAR(down_deviation, 0.02 / 4, 5e-5);
}

TEST(Dropout, KeepsWhatPhiloxSaysElementByElement) {
  LayerState state;
  state.random_key = 99;
  LayerContext context;
  context.step = 3;
  context.micro_batch = MicroBatchId{2};
  const double p = 0.3;
  const at::Tensor y = dropout(at::ones({7, 31}), p, state, context, 5);
  const std::uint64_t key = mix_key({99, 3, 2, 5});
  for (std::int64_t i = 0; i < y.numel(); ++i) {
    const auto word =
        philox(key, {static_cast<std::uint32_t>(i / 4), 0, 0, 0})[static_cast<std::size_t>(i % 4)];
    const float expected = word >= p * 0x1p32 ? static_cast<float>(1 / (1 - p)) : 0.0F;
    EXPECT_EQ(y.data_ptr<float>()[i], expected) << i;
  }
}

TEST(Dropout, OfAProbabilityJustBelowOneDropsNearlyAll) {
  for (const double p : {1 - 0x1p-32, 1 - 0x1p-33, 1 - 0x1p-53}) {
    const at::Tensor y = dropout(at::ones({64, 64}), p, {}, {}, 5);
    EXPECT_EQ(y.count_nonzero().item<std::int64_t>(), 0) << 1 - p;
  }
}

TEST(Dropout, DependsOnKeyStepMicroBatchAndSaltAlone) {
  const at::Tensor x = at::ones({64, 64});
  const auto run = [&](std::uint64_t key, std::int64_t step, int micro_batch, std::uint64_t salt) {
    LayerState state;
    state.random_key = key;
    LayerContext context;
    context.step = step;
    context.micro_batch = MicroBatchId{micro_batch};
    return dropout(x, 0.5, state, context, salt);
  };
  const at::Tensor first = run(1, 2, 3, 4);
  for (const at::Tensor& other :
       {run(2, 2, 3, 4), run(1, 3, 3, 4), run(1, 2, 4, 4), run(1, 2, 3, 5)}) {
    EXPECT_NEAR((first == other).to(at::kDouble).mean().item<double>(), 0.5, 0.05);
  }
  EXPECT_TRUE(same_bits(first, run(1, 2, 3, 4)));
  EXPECT_NEAR(first.mean().item<double>(), 1, 0.05);
}

TEST(Dropout, IsTheIdentityOutsideTraining) {
  const at::Tensor x = random_tensor({3, 4}, 1);
  LayerContext context;
  EXPECT_TRUE(dropout(x, 0, {}, context, 0).is_same(x));
  for (const Pass pass : {Pass::kValidation, Pass::kGeneration}) {
    context.pass = pass;
    EXPECT_TRUE(dropout(x, 0.5, {}, context, 0).is_same(x));
  }
}

}  // namespace
}  // namespace dynmo::model
