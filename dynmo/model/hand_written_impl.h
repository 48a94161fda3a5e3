// SPDX-License-Identifier: Apache-2.0
#pragma once

// What layers written by hand share: the order of the three calls, and the products that most of
// them end in. A layer derives from HandWritten with its own stash and writes run, differentiate
// and accumulate.

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/model/generic_impl.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/operations.h"
#include "dynmo/model/products_impl.h"

namespace dynmo::model {

inline at::Tensor rows(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// A stash with the order of the three calls. A layer takes out of it what later calls do not need.
struct Kept : Stash {
  enum class Phase { kForward, kInputDone, kDone } phase = Phase::kForward;
};

// The stash as the layer's own type, moved on to the next phase.
template <typename T>
T& advance(Stash& stash, Kept::Phase from, const std::string& name) {
  auto& kept = dynamic_cast<T&>(stash);
  DYNMO_CHECK(kept.phase == from, "{}: input_gradient, then weight_gradient, once per stash", name);
  kept.phase = from == Kept::Phase::kForward ? Kept::Phase::kInputDone : Kept::Phase::kDone;
  return kept;
}

// What the layers share: name, parameters, and that a frozen layer adds no weight gradients.
template <typename T>
class HandWritten : public Layer {
 public:
  HandWritten(std::string name, std::vector<ParameterSpec> specs)
      : name_(std::move(name)), specs_(std::move(specs)) {}
  std::string name() const override { return name_; }
  std::vector<ParameterSpec> parameters() const override { return specs_; }

  at::Tensor forward(const LayerState& state, const at::Tensor& input, const LayerContext& context,
                     std::unique_ptr<Stash>* stash) const override {
    DYNMO_CHECK(state.parameters.size() == specs_.size(), "{} parameters for {}, got {}",
                specs_.size(), name_, state.parameters.size());
    const at::NoGradGuard no_graph;
    T kept;
    at::Tensor output = run(state, input, context, kept);
    if (stash != nullptr) *stash = std::make_unique<T>(std::move(kept));
    return output;
  }
  at::Tensor input_gradient(const LayerState& state, Stash& stash,
                            const at::Tensor& output_gradient,
                            InputGradient wanted) const override {
    const at::NoGradGuard no_graph;
    T& kept = advance<T>(stash, Kept::Phase::kForward, name_);
    at::Tensor gradient = differentiate(state, kept, output_gradient, wanted);
    if (state.frozen) clear(kept);
    return gradient;
  }
  void weight_gradient(LayerState& state, Stash& stash) const override {
    const at::NoGradGuard no_graph;
    T& kept = advance<T>(stash, Kept::Phase::kInputDone, name_);
    if (!state.frozen) accumulate(state, kept);
    clear(kept);
  }

 private:
  virtual at::Tensor run(const LayerState& state, const at::Tensor& input,
                         const LayerContext& context, T& kept) const = 0;
  virtual at::Tensor differentiate(const LayerState& state, T& kept,
                                   const at::Tensor& output_gradient,
                                   InputGradient wanted) const = 0;
  virtual void accumulate(LayerState& state, T& kept) const = 0;

  static void clear(T& kept) {
    const Kept::Phase phase = kept.phase;
    kept = T();
    kept.phase = phase;
  }

  std::string name_;
  std::vector<ParameterSpec> specs_;
};

// What the layer computes with, of its parameter i.
inline const at::Tensor& value(const LayerState& state, std::size_t i) {
  return operand(state.parameters[i]);
}

// gradient += dy^T x, in place: one product, no temporary. Where there is no product of bf16 into
// fp32, that of a micro-batch is rounded before it is added.
inline void add_product(Parameter& parameter, const at::Tensor& dy_NO, const at::Tensor& x_NI) {
  if (dy_NO.scalar_type() != at::kBFloat16) {
    parameter.gradient.addmm_(dy_NO.t(), x_NI);
  } else if (dy_NO.is_cpu() && has_products<c10::BFloat16>()) {
    add_product(parameter.gradient, dy_NO, x_NI);
  } else {
    parameter.gradient.add_(at::mm(dy_NO.t(), x_NI));
  }
}

template <typename Sum, typename Scalar = Sum>
void add_rows_of(at::Tensor& gradient_VD, const at::Tensor& tokens, const at::Tensor& rows_ND) {
  const std::int64_t width = gradient_VD.size(1);
  const auto* token = tokens.const_data_ptr<std::int64_t>();
  const auto* from = rows_ND.const_data_ptr<Scalar>();
  auto* table = gradient_VD.data_ptr<Sum>();
  for (std::int64_t n = 0; n < tokens.numel(); ++n, from += width) {
    Sum* to = table + token[n] * width;
    for (std::int64_t d = 0; d < width; ++d) to[d] += static_cast<Sum>(from[d]);
  }
}

// Adds each row of `from` to the row of gradient_VD that its token names, row by row in the order
// of the tokens, whatever the number of threads; on other devices in theirs.
inline void add_rows(at::Tensor& gradient_VD, const at::Tensor& tokens, const at::Tensor& from) {
  if (!gradient_VD.is_cpu()) return generic::add_rows(gradient_VD, tokens, from);
  if (gradient_VD.scalar_type() == at::kDouble) {
    add_rows_of<double>(gradient_VD, tokens.contiguous(), from.contiguous());
  } else if (from.scalar_type() == at::kBFloat16) {
    add_rows_of<float, at::BFloat16>(gradient_VD, tokens.contiguous(), from.contiguous());
  } else {
    add_rows_of<float>(gradient_VD, tokens.contiguous(), from.contiguous());
  }
}

// How a half block ends its forward pass: x + dropout(update), [N, D], in the memory of the update
// (or of what dropout left of it).
inline at::Tensor with_residual(const at::Tensor& update_ND, const at::Tensor& mask, double p,
                                const at::Tensor& x_ND) {
  return masked(update_ND, mask, p).add_(x_ND);
}

// The loss at the end of a head: cross entropy of n W^T. What the stash keeps of it.
struct LossKept {
  at::Tensor scores_NV;  // probabilities, fp32 also in bf16; from differentiate on, gradient of the
                         // scores
  at::Tensor targets_N;

  // The mean over the micro-batch, a scalar.
  [[nodiscard]] at::Tensor start(const at::Tensor& n_ND, const at::Tensor& weight_VD,
                                 const LayerContext& context) {
    scores_NV = at::linear(n_ND, weight_VD).to(statistics_type(n_ND.scalar_type()));
    targets_N = context.targets_BT.reshape({-1});
    return cross_entropy(scores_NV, targets_N);
  }
  // From the gradient of the loss, a scalar on the CPU, to that of n. d loss / d scores =
  // (softmax - one-hot) / N, in the buffer that held the probabilities.
  [[nodiscard]] at::Tensor differentiate(const at::Tensor& weight_VD,
                                         const at::Tensor& loss_gradient) {
    cross_entropy_gradient(scores_NV, targets_N, loss_gradient.item<double>());
    targets_N.reset();
    scores_NV = scores_NV.to(weight_VD.scalar_type());
    return at::mm(scores_NV, weight_VD);
  }
};

}  // namespace dynmo::model
