// SPDX-License-Identifier: Apache-2.0
#pragma once

// The base of all decorators: a layer that forwards every call to another layer. A decorator
// overrides what it changes. A new function of Layer is forwarded here once for all of them.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/model/layer.h"

namespace dynmo::model {

class ForwardingLayer : public Layer {
 public:
  explicit ForwardingLayer(std::shared_ptr<const Layer> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] std::string name() const override { return inner_->name(); }
  [[nodiscard]] std::vector<ParameterSpec> parameters() const override {
    return inner_->parameters();
  }
  [[nodiscard]] std::vector<BufferSpec> buffers() const override { return inner_->buffers(); }
  [[nodiscard]] std::vector<std::string> figures() const override { return inner_->figures(); }
  [[nodiscard]] Needs needs() const override { return inner_->needs(); }
  [[nodiscard]] at::ScalarType compute_type() const override { return inner_->compute_type(); }
  [[nodiscard]] std::int64_t floats_passed() const override { return inner_->floats_passed(); }

  [[nodiscard]] Output forward(const LayerState& state, const Hidden& input,
                               const LayerContext& context,
                               std::unique_ptr<Stash>* stash) const override {
    return inner_->forward(state, input, context, stash);
  }
  [[nodiscard]] at::Tensor input_gradient(const LayerState& state, Stash& stash,
                                          const at::Tensor& output_gradient,
                                          InputGradient wanted) const override {
    return inner_->input_gradient(state, stash, output_gradient, wanted);
  }
  void weight_gradient(LayerState& state, Stash& stash) const override {
    inner_->weight_gradient(state, stash);
  }

 protected:
  [[nodiscard]] const Layer& inner() const { return *inner_; }

 private:
  std::shared_ptr<const Layer> inner_;
};

// Appends the figures of a decorator to those of the inner layer: first `figures`, then `later`,
// which may be undefined. If the inner layer has later figures, all of the decorator's become later
// figures.
void add_figures(Output& output, const std::vector<double>& figures, const at::Tensor& later);

}  // namespace dynmo::model
