// SPDX-License-Identifier: Apache-2.0
// Layers in bf16. The oracle is the same layer in fp64 on the very numbers that bf16 holds;
// gradient_test.cpp holds that one against autograd to 1e-9.
#include "dynmo/model/precision.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "dynmo/core/check.h"
#include "dynmo/kernels/operations.h"
#include "dynmo/model/adamw.h"
#include "dynmo/model/autograd_layer.h"
#include "dynmo/model/gpt2.h"
#include "dynmo/model/state_bytes.h"
#include "gradients.h"
#include "helpers.h"
#include "stash_bytes.h"

namespace dynmo::model {
namespace {

using testing::by_three_calls;
using testing::Gradients;
using testing::random_tensor;
using testing::same_bits;

constexpr double kRoundoff = 0x1p-9;  // half a unit in the last of bf16's 8 bits, relative

// A larger model than tiny_config, so that sums have some length.
LlamaConfig small_config() {
  LlamaConfig config = testing::tiny_config();
  config.shape.hidden = 64;
  config.shape.intermediate = 96;
  config.shape.vocabulary = 51;
  config.shape.sequence = 32;
  return config;
}

double relative_error(const at::Tensor& bf16, const at::Tensor& exact) {
  EXPECT_EQ(bf16.sizes(), exact.sizes());
  return ((bf16.to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
}

struct Bf16Case {
  std::string family;
  std::size_t layer = 0;
  double dropout = 0;
};
void PrintTo(const Bf16Case& c, std::ostream* out) {
  *out << c.family << " layer " << c.layer << " dropout " << c.dropout;
}

Model model_of(const std::string& family, const LlamaConfig& config) {
  if (family == "llama") return make_llama(config);
  Gpt2Config gpt2;
  gpt2.shape.vocabulary = config.shape.vocabulary;
  gpt2.shape.hidden = config.shape.hidden;
  gpt2.shape.blocks = config.shape.blocks;
  gpt2.shape.heads = config.shape.heads;
  gpt2.shape.intermediate = config.shape.intermediate;
  gpt2.shape.sequence = gpt2.shape.positions = config.shape.sequence;
  gpt2.dropout = config.dropout;
  return make_gpt2(gpt2);
}

class Bf16Layers : public ::testing::TestWithParam<Bf16Case> {};

// Each value passes at most seven roundings on its way through a half block forward (normed input,
// gate, up, silu, their product, the projection, the sum) and as many again backward. Independent
// roundings add up as their root: sqrt(7) and sqrt(14) roundoffs of the largest part; twice and
// three times that is allowed because parts cancel, most of all in sums over tokens. An error of
// statistics, softmax or angles in bf16 is beyond it.
TEST_P(Bf16Layers, MatchTheSameLayerInFp64) {
  const auto [family, index, p] = GetParam();
  LlamaConfig config = small_config();
  config.dropout = p;
  const Model plain = model_of(family, config);
  const Model model = in_precision(plain, cost::Precision::kBf16);
  const LayerId id{static_cast<int>(index)};
  LayerState exact = testing::double_state(*plain[index], id, 5);
  LayerState state = make_state(*model[index], id, 5);
  for (std::size_t i = 0; i < state.parameters.size(); ++i) {
    at::Tensor& value = exact.parameters[i].value;
    state.parameters[i].value.copy_(value.mul_(0.3).to(at::kBFloat16));
    value = state.parameters[i].value.to(at::kDouble);
  }
  derive(*model[index], state);
  const LayerContext context = testing::random_context(config.shape, 3, 9);
  at::Tensor input;
  if (index > 0)
    input = random_tensor({3, config.shape.sequence, config.shape.hidden}, 21, at::kBFloat16);
  const bool head = index + 1 == model.size();
  const at::Tensor dy =
      head ? at::full({}, 0.5, at::kFloat)
           : random_tensor({3, config.shape.sequence, config.shape.hidden}, 22, at::kBFloat16);
  const Gradients ours = by_three_calls(*model[index], state, input, context, dy);
  const Gradients wanted =
      by_three_calls(*plain[index], exact, input.defined() ? input.to(at::kDouble) : input, context,
                     dy.to(at::kDouble));
  const double forward = 2 * std::sqrt(7) * kRoundoff;
  const double backward = 3 * std::sqrt(14) * kRoundoff;
  EXPECT_EQ(ours.output.scalar_type(), head ? at::kFloat : at::kBFloat16);
  EXPECT_LE(relative_error(ours.output, wanted.output), forward);
  ASSERT_EQ(ours.input.defined(), wanted.input.defined());
  if (ours.input.defined()) {
    EXPECT_EQ(ours.input.scalar_type(), at::kBFloat16);
    EXPECT_LE(relative_error(ours.input, wanted.input), backward);
    EXPECT_GE(relative_error(ours.input, wanted.input), kRoundoff / 4) << "is it bf16 at all?";
  }
  for (std::size_t i = 0; i < wanted.parameters.size(); ++i) {
    EXPECT_EQ(ours.parameters[i].scalar_type(), at::kFloat);
    EXPECT_LE(relative_error(ours.parameters[i], wanted.parameters[i]), backward)
        << state.parameters[i].name;
    EXPECT_GT(wanted.parameters[i].norm().item<double>(), 1e-3) << "a gradient to compare";
  }
}

INSTANTIATE_TEST_SUITE_P(Families, Bf16Layers,
                         ::testing::Values(Bf16Case{"llama", 0}, Bf16Case{"llama", 1},
                                           Bf16Case{"llama", 1, 0.3}, Bf16Case{"llama", 2},
                                           Bf16Case{"llama", 2, 0.3}, Bf16Case{"llama", 5},
                                           Bf16Case{"gpt2", 0}, Bf16Case{"gpt2", 1},
                                           Bf16Case{"gpt2", 1, 0.3}, Bf16Case{"gpt2", 2},
                                           Bf16Case{"gpt2", 2, 0.3}, Bf16Case{"gpt2", 5}));

TEST(Bf16, StatisticsLossAndGradientSumsAreFp32) {
  const at::Tensor x = random_tensor({5, 4096}, 3, at::kBFloat16);
  const auto inverse_of = [](const at::Tensor& rows) {
    return kernels::rms_norm(rows, at::ones({4096}, rows.options()), 1e-5).inverse_N1;
  };
  const at::Tensor inverse = inverse_of(x);
  EXPECT_EQ(inverse.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::allclose(inverse.to(at::kDouble), inverse_of(x.to(at::kDouble)), 1e-5, 0));

  // The loss has no other rounding than that of the scores.
  const LlamaConfig config = small_config();
  const Model model = in_precision(make_llama(config), cost::Precision::kBf16);
  const LayerState head = make_state(*model[5], LayerId{5}, 3);
  const LayerContext context = testing::random_context(config.shape, 2, 4);
  const at::Tensor hidden =
      random_tensor({2, config.shape.sequence, config.shape.hidden}, 8, at::kBFloat16).mul(20);
  const at::Tensor x_ND = hidden.view({-1, config.shape.hidden});
  const at::Tensor scores = at::linear(
      kernels::rms_norm(x_ND, compute_value(head.parameters[0]), config.rms_epsilon).y_ND,
      compute_value(head.parameters[1]));
  const at::Tensor expected =
      at::cross_entropy_loss(scores.to(at::kDouble), context.targets_BT.view(-1));
  const at::Tensor loss = model[5]->forward(head, hidden, context, nullptr).loss;
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), expected.item<double>(), 1e-5 * expected.item<double>());

  // 1000 gradients of 1: a sum in bf16 stops growing at 256.
  const auto embedding = model[0];
  LayerState table = make_state(*embedding, LayerId{0}, 3);
  LayerContext same;
  same.tokens_BT = at::zeros({1, 1000}, at::kLong);
  std::unique_ptr<Stash> stash;
  (void)embedding->forward(table, {}, same, &stash);
  (void)embedding->input_gradient(table, *stash,
                                  at::ones({1, 1000, config.shape.hidden}, at::kBFloat16),
                                  Layer::InputGradient::kNotWanted);
  embedding->weight_gradient(table, *stash);
  EXPECT_EQ(table.parameters[0].gradient[0][0].item<double>(), 1000);
}

TEST(Bf16, AnAutogradLayerComputesInItToo) {
  const std::vector<ParameterSpec> specs = {{.name = "w", .shape = {8, 8}, .init_std = 1}};
  const auto layer =
      in_precision({autograd_layer("linear", specs,
                                   [](const auto& p, const at::Tensor& x, const LayerContext&,
                                      const LayerState&) { return at::linear(x, p[0]); })},
                   cost::Precision::kBf16)[0];
  LayerState state = make_state(*layer, LayerId{0}, 3);
  const at::Tensor x = random_tensor({4, 8}, 1, at::kBFloat16);
  const at::Tensor dy = random_tensor({4, 8}, 2, at::kBFloat16);
  const Gradients result = by_three_calls(*layer, state, x, {}, dy);
  EXPECT_EQ(result.output.scalar_type(), at::kBFloat16);
  EXPECT_EQ(result.parameters[0].scalar_type(), at::kFloat);
  const at::Tensor exact = dy.to(at::kDouble).t().matmul(x.to(at::kDouble));
  EXPECT_LE(relative_error(result.parameters[0], exact), 2 * kRoundoff);
}

// Near 1, bf16 knows 1 and 1 - 2^-8. Steps of 2^-12 are lost on it one by one, not on the master.
TEST(Bf16, UpdatesBelowItsResolutionAddUp) {
  const Model model = in_precision(make_llama(small_config()), cost::Precision::kBf16);
  LayerState state = make_state(*model[1], LayerId{1}, 3);
  Parameter& norm = state.parameters[0];  // ones
  at::Tensor without_master = norm.compute_copy.clone();
  const AdamWOptions options{.learning_rate = 0x1p-12, .weight_decay = 0};
  const auto step = [&] {
    for (Parameter& p : state.parameters) p.gradient.fill_(1);
    const at::Tensor before = norm.value.clone();
    update(state, options);
    without_master.add_((norm.value - before).to(at::kBFloat16));
  };
  step();
  EXPECT_LT(norm.value[0].item<double>(), 1.0);
  EXPECT_EQ(norm.compute_copy[0].item<double>(), 1.0);
  for (int i = 1; i < 64; ++i) step();
  EXPECT_NEAR(norm.value[0].item<double>(), 1 - 64 * 0x1p-12, 1e-5);
  EXPECT_EQ(norm.compute_copy[0].item<double>(), 1 - 64 * 0x1p-12);
  EXPECT_EQ(without_master[0].item<double>(), 1.0);
  for (const Parameter& p : state.parameters) {
    EXPECT_TRUE(same_bits(p.compute_copy, p.value.to(at::kBFloat16))) << p.name;
  }
}

TEST(Bf16, ComputedStashesAndCopiesAreThoseMeasured) {
  for (const double p : {0.0, 0.1}) {
    LlamaConfig config = small_config();
    config.dropout = p;
    const Model model = in_precision(make_llama(config), cost::Precision::kBf16);
    const LayerContext context = testing::random_context(config.shape, 3, 4);
    const at::Tensor x =
        random_tensor({3, config.shape.sequence, config.shape.hidden}, 8, at::kBFloat16);
    EXPECT_EQ(boundary_bytes(config, 3, cost::Precision::kBf16).value,
              static_cast<std::int64_t>(x.nbytes()));
    for (std::size_t i = 0; i < model.size(); ++i) {
      const LayerId id{static_cast<int>(i)};
      const LayerState state = make_state(*model[i], id, 3);
      const StashBytes bytes = measure_stash(*model[i], state, i == 0 ? at::Tensor() : x, context);
      EXPECT_EQ(bytes.held.value, activation_bytes(config, id, 3, cost::Precision::kBf16).value)
          << model[i]->name() << " dropout " << p;
      std::size_t copies = 0;
      for (const Parameter& parameter : state.parameters) copies += parameter.compute_copy.nbytes();
      EXPECT_EQ(copy_bytes(*model[i]).value, static_cast<std::int64_t>(copies));
      EXPECT_EQ(copy_bytes(*model[i]) * 2, parameter_bytes(*model[i]));
    }
  }
  EXPECT_EQ(copy_bytes(*make_llama(small_config())[1]), Bytes{0});
}

class Bf16Training : public ::testing::Test {
 protected:
  void train(const Model& model, std::vector<LayerState>& states, int step,
             double learning_rate = 1e-2, std::vector<double>* losses = nullptr) const {
    LayerContext context = testing::random_context(config_.shape, 2, 4);  // to be learned by heart
    context.step = step;
    const double loss = testing::backward(model, states, context);
    if (losses != nullptr) losses->push_back(loss);
    for (LayerState& state : states) {
      update(state, {.learning_rate = learning_rate});
    }
  }
  LlamaConfig config_ = small_config();
};

TEST_F(Bf16Training, AStateCopiedByItsBytesTrainsOnWithTheSameBits) {
  const Model model = in_precision(make_llama(config_), cost::Precision::kBf16);
  std::vector<LayerState> states = testing::make_states(model, 3);
  for (int step = 0; step < 2; ++step) train(model, states, step);
  std::vector<LayerState> copies;
  for (std::size_t i = 0; i < model.size(); ++i) {
    LayerState copy = allocate_like(*model[i], header(states[i])).value();
    const auto from = tensors(std::as_const(states[i]));
    const auto to = tensors(copy);
    ASSERT_EQ(from.size(), to.size());
    for (std::size_t j = 0; j < from.size(); ++j) {
      std::memcpy(to[j].bytes.data(), from[j].bytes.data(), from[j].bytes.size());
    }
    EXPECT_EQ(tensor_bytes(copy), parameter_bytes(*model[i]) * 3) << "copies do not travel";
    if (i == 1) {
      const at::Tensor x = at::zeros({1, 2, config_.shape.hidden}, at::kBFloat16);
      EXPECT_THROW((void)model[i]->forward(copy, x, {}, nullptr), CheckFailure)
          << "a state that nobody rounded";
    }
    derive(*model[i], copy);
    copies.push_back(std::move(copy));
  }
  for (int step = 2; step < 4; ++step) {
    train(model, states, step);
    train(model, copies, step);
  }
  for (std::size_t i = 0; i < model.size(); ++i) {
    EXPECT_EQ(digest(copies[i]), digest(states[i]));
    for (std::size_t j = 0; j < states[i].parameters.size(); ++j) {
      EXPECT_TRUE(
          same_bits(copies[i].parameters[j].compute_copy, states[i].parameters[j].compute_copy));
    }
  }
}

// Each loss within 2 % of fp32's or 0.02, over a fall from ln 51 = 3.9 to a quarter of it. (At a
// learning rate at which fp32 itself jumps, the two drift apart between jumps.)
TEST_F(Bf16Training, ItsLossesFollowThoseOfFp32) {
  std::vector<double> losses[2];
  for (const cost::Precision precision : {cost::Precision::kFp32, cost::Precision::kBf16}) {
    const Model model = in_precision(make_llama(config_), precision);
    std::vector<LayerState> states = testing::make_states(model, 3);
    for (int step = 0; step < 60; ++step) {
      train(model, states, step, 2e-3, &losses[precision == cost::Precision::kBf16 ? 1 : 0]);
    }
  }
  EXPECT_LT(losses[0].back(), 0.25 * losses[0].front());
  EXPECT_NE(losses[0], losses[1]);
  for (std::size_t i = 0; i < losses[0].size(); ++i) {
    EXPECT_NEAR(losses[1][i], losses[0][i], std::max(0.02, 0.02 * losses[0][i])) << "step " << i;
  }
}

}  // namespace
}  // namespace dynmo::model
