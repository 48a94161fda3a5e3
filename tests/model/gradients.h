// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gradients of one layer, of the loss if it has one: by its three calls, and by autograd through a
// plain composition of libtorch's operations.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <memory>
#include <vector>

#include "dynmo/model/layer.h"

namespace dynmo::model::testing {

// The tensor that a layer's gradients are of.
inline at::Tensor made_by(const Output& output) {
  return output.loss.defined() ? output.loss : output.hidden.x;
}

struct Gradients {
  at::Tensor output;
  at::Tensor input;
  std::vector<at::Tensor> parameters;
};

inline Gradients by_three_calls(const Layer& layer, LayerState& state, const at::Tensor& input,
                                LayerContext context, const at::Tensor& output_gradient) {
  std::unique_ptr<Stash> stash;
  Gradients result;
  const bool head = layer.needs().loss;
  if (head) context.loss_weight = output_gradient.item<double>();
  const Output output = layer.forward(state, input, context, &stash);
  result.output = made_by(output);
  result.input = layer.input_gradient(state, *stash, head ? at::Tensor() : output_gradient,
                                      Layer::InputGradient::kWanted);
  layer.weight_gradient(state, *stash);
  for (const Parameter& p : state.parameters) result.parameters.push_back(p.gradient);
  return result;
}

// `function` of the state's values and the input.
template <typename Function>
Gradients by_autograd(const LayerState& state, const at::Tensor& input,
                      const at::Tensor& output_gradient, const Function& function) {
  std::vector<at::Tensor> leaves;
  for (const Parameter& p : state.parameters) {
    leaves.push_back(p.value.clone().set_requires_grad(true));
  }
  const std::vector<at::Tensor> parameters = leaves;
  at::Tensor x;
  if (input.defined()) leaves.push_back(x = input.clone().set_requires_grad(true));
  const at::Tensor y = function(parameters, x);
  Gradients result;
  result.output = y.detach();
  result.parameters = torch::autograd::grad({y}, leaves, {output_gradient});
  if (input.defined()) {
    result.input = result.parameters.back();
    result.parameters.pop_back();
  }
  return result;
}

// Compares the gradients of one layer in fp64, none of which is zero.
inline void expect_near(const Gradients& ours, const Gradients& plain, const LayerState& state) {
  const auto near = [](const at::Tensor& a, const at::Tensor& b) {
    return a.sizes() == b.sizes() && at::allclose(a, b, 1e-9, 1e-11);
  };
  EXPECT_TRUE(near(ours.output, plain.output));
  ASSERT_EQ(ours.input.defined(), plain.input.defined());
  if (ours.input.defined()) {
    EXPECT_TRUE(near(ours.input, plain.input));
  }
  ASSERT_EQ(ours.parameters.size(), plain.parameters.size());
  for (std::size_t i = 0; i < plain.parameters.size(); ++i) {
    EXPECT_TRUE(near(ours.parameters[i], plain.parameters[i])) << state.parameters[i].name;
    EXPECT_GT(plain.parameters[i].abs().max().item<double>(), 1e-4) << "a gradient to compare";
  }
}

}  // namespace dynmo::model::testing
