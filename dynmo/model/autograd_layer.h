// SPDX-License-Identifier: Apache-2.0
#pragma once

// Layers made of one function, for new ideas and for checks of other layers.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dynmo/model/layer.h"

namespace dynmo::model {

// A function that is a whole layer, differentiated by autograd. It is the start of every new layer,
// and the oracle of hand-written ones. `parameters` are the operands of `specs`, in order. Autograd
// computes both gradients in one pass at input_gradient, and weight_gradient only adds them.
//
// The rows of a ragged input pass through, unless the function's Output names others.
using AutogradFunction =
    std::function<Output(const std::vector<at::Tensor>& parameters, const at::Tensor& input,
                         const LayerContext& context, const LayerState& state)>;
// A function for layers that only map a hidden tensor to the next one.
using HiddenFunction =
    std::function<at::Tensor(const std::vector<at::Tensor>& parameters, const at::Tensor& input,
                             const LayerContext& context, const LayerState& state)>;
// The parts of an autograd layer in addition to its parameters and its function.
struct AutogradTraits {
  std::vector<BufferSpec> buffers = {};
  std::vector<std::string> figures = {};
  Needs needs = {};
};
[[nodiscard]] std::shared_ptr<const Layer> autograd_layer(std::string name,
                                                          std::vector<ParameterSpec> specs,
                                                          AutogradFunction function,
                                                          AutogradTraits traits = {});
[[nodiscard]] std::shared_ptr<const Layer> autograd_layer(std::string name,
                                                          std::vector<ParameterSpec> specs,
                                                          HiddenFunction function,
                                                          AutogradTraits traits = {});

}  // namespace dynmo::model
