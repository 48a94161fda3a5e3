// SPDX-License-Identifier: Apache-2.0
// Every kind of layer against two oracles in fp64: central differences, and a plain composition of
// libtorch's operations under autograd.
#include <gtest/gtest.h>

#include <cmath>

#include "dynmo/core/rng.h"
#include "dynmo/model/dropout.h"
#include "gradients.h"
#include "helpers.h"

namespace dynmo::model {
namespace {

using testing::Gradients;
using testing::plain_attention;
using testing::plain_mlp;
using testing::plain_norm;
using testing::random_tensor;

struct LlamaCase {
  std::string kind;
  std::size_t layer;
  double dropout = 0;
  bool qkv_bias = false;
};
void PrintTo(const LlamaCase& c, std::ostream* out) { *out << c.kind << " dropout " << c.dropout; }

class LayerGradients : public ::testing::TestWithParam<LlamaCase> {
 protected:
  void SetUp() override {
    config_ = testing::tiny_config();
    config_.dropout = GetParam().dropout;
    config_.qkv_bias = GetParam().qkv_bias;
    layer_ = make_llama(config_)[GetParam().layer];
    state_ = testing::double_state(*layer_, LayerId{static_cast<int>(GetParam().layer)}, 5);
    context_ = testing::random_context(config_.shape, 3, 9);
    if (GetParam().kind != "embedding") input_ = random_tensor({3, 10, 24}, 21);
  }

  [[nodiscard]] at::Tensor run(const at::Tensor& input) const {
    return testing::made_by(layer_->forward(state_, input, context_, nullptr));
  }
  Gradients by_layer(const at::Tensor& output_gradient) {
    return testing::by_three_calls(*layer_, state_, input_, context_, output_gradient);
  }
  [[nodiscard]] at::Tensor plain(const std::vector<at::Tensor>& p, const at::Tensor& x) const;

  LlamaConfig config_;
  std::shared_ptr<const Layer> layer_;
  LayerState state_;
  LayerContext context_;
  at::Tensor input_;
};

TEST_P(LayerGradients, MatchCentralDifferencesInRandomDirections) {
  const at::Tensor weight = random_tensor(run(input_).sizes(), 31);
  const Gradients gradients = by_layer(weight);
  constexpr double kStep = 1e-5;
  for (std::uint64_t direction = 0; direction < 8; ++direction) {
    std::vector<at::Tensor> moved;
    std::vector<at::Tensor> slopes;
    const auto add = [&](const at::Tensor& tensor, const at::Tensor& slope) {
      moved.push_back(tensor);
      slopes.push_back(slope);
    };
    // One direction for each tensor alone, then some for all together.
    const std::size_t tensors = state_.parameters.size() + (input_.defined() ? 1 : 0);
    for (std::size_t i = 0; i < state_.parameters.size(); ++i) {
      if (direction >= tensors || direction == i) {
        add(state_.parameters[i].value, gradients.parameters[i]);
      }
    }
    if (input_.defined() && direction + 1 >= tensors) add(input_, gradients.input);
    std::vector<at::Tensor> steps;
    double expected = 0;
    for (std::size_t i = 0; i < moved.size(); ++i) {
      steps.push_back(random_tensor(moved[i].sizes(), mix_key({direction, i, 41})));
      expected += (slopes[i] * steps[i]).sum().item<double>();
    }
    const auto value_at = [&](double distance) {
      for (std::size_t i = 0; i < moved.size(); ++i) moved[i].add_(steps[i], distance);
      const double value = (run(input_) * weight).sum().item<double>();
      for (std::size_t i = 0; i < moved.size(); ++i) moved[i].sub_(steps[i], distance);
      return value;
    };
    const double measured = (value_at(kStep) - value_at(-kStep)) / (2 * kStep);
    EXPECT_NEAR(measured, expected, 1e-6 * (1 + std::abs(expected))) << "direction " << direction;
  }
}

at::Tensor LayerGradients::plain(const std::vector<at::Tensor>& p, const at::Tensor& x) const {
  const std::string& kind = GetParam().kind;
  if (kind == "embedding") return p[0].index({context_.tokens_BT});
  if (kind == "head") {
    const at::Tensor logits = plain_norm(x, p[0], config_.rms_epsilon)
                                  .matmul(p[1].t())
                                  .view({-1, config_.shape.vocabulary});
    return at::cross_entropy_loss(logits, context_.targets_BT.view(-1));
  }
  const at::Tensor update =
      kind == "attention" ? plain_attention(config_, p, x) : plain_mlp(config_, p, x);
  const at::Tensor mask =
      dropout(at::ones_like(update), config_.dropout, state_, context_, /*salt=*/1);
  return x + update * mask;
}

TEST_P(LayerGradients, MatchAPlainCompositionOfOperations) {
  const at::Tensor output_gradient = random_tensor(run(input_).sizes(), 51);
  const Gradients expected = testing::by_autograd(
      state_, input_, output_gradient,
      [&](const std::vector<at::Tensor>& p, const at::Tensor& x) { return plain(p, x); });
  testing::expect_near(by_layer(output_gradient), expected, state_);
}

INSTANTIATE_TEST_SUITE_P(Llama, LayerGradients,
                         ::testing::Values(LlamaCase{"embedding", 0}, LlamaCase{"attention", 1},
                                           LlamaCase{"attention", 1, 0.3},
                                           LlamaCase{"attention", 1, 0, true}, LlamaCase{"mlp", 2},
                                           LlamaCase{"mlp", 2, 0.3}, LlamaCase{"head", 5}),
                         [](const auto& test) {
                           return test.param.kind + (test.param.dropout > 0 ? "WithDropout" : "") +
                                  (test.param.qkv_bias ? "WithBiases" : "");
                         });

}  // namespace
}  // namespace dynmo::model
