// SPDX-License-Identifier: Apache-2.0
#pragma once

// The common parts of hand-written layers: the order of the three calls, and the products that most
// of them end in. A layer derives from HandWritten with its own stash. It defines the three calls
// on it: forward, input_gradient, weight_gradient.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/kernels/generic.h"
#include "dynmo/kernels/operations.h"
#include "dynmo/kernels/products.h"
#include "dynmo/kernels/sparse_products.h"
#include "dynmo/model/attention_pattern.h"
#include "dynmo/model/dropout.h"
#include "dynmo/model/key_value_cache.h"
#include "dynmo/model/layer.h"
#include "dynmo/model/ragged_rows.h"

namespace dynmo::model {

inline at::Tensor rows(const at::Tensor& x) { return x.reshape({-1, x.size(-1)}); }

// A stash with the order of the three calls. A layer removes from it what later calls do not need.
struct Saved : Stash {
  enum class Phase { kForward, kInputDone, kDone } phase = Phase::kForward;

  // Returns all its tensors, except for tokens and targets.
  [[nodiscard]] virtual std::vector<at::Tensor> tensors() const = 0;
  [[nodiscard]] std::optional<Bytes> bytes() const final {
    Bytes total;
    for (const at::Tensor& tensor : tensors()) {
      if (tensor.defined()) total += Bytes{static_cast<std::int64_t>(tensor.nbytes())};
    }
    return total;
  }
};

// Returns the stash as the layer's own type, and moves it to the next phase.
template <typename T>
T& advance(Stash& stash, Saved::Phase from, const std::string& name) {
  auto& saved = dynamic_cast<T&>(stash);
  DYNMO_CHECK(saved.phase == from, "{}: input_gradient, then weight_gradient, once per stash",
              name);
  saved.phase = from == Saved::Phase::kForward ? Saved::Phase::kInputDone : Saved::Phase::kDone;
  return saved;
}

// A base with what the layers share: name and parameters. It also ensures that a frozen layer adds
// no weight gradients.
template <typename T>
class HandWritten : public Layer {
 public:
  HandWritten(std::string name, std::vector<ParameterSpec> specs)
      : name_(std::move(name)), specs_(std::move(specs)) {}
  std::string name() const override { return name_; }
  std::vector<ParameterSpec> parameters() const override { return specs_; }

  Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                 std::unique_ptr<Stash>* stash) const final {
    DYNMO_CHECK(state.parameters.size() == specs_.size(), "{} parameters for {}, got {}",
                specs_.size(), name_, state.parameters.size());
    DYNMO_CHECK(stash == nullptr || context.cache == nullptr, "{}: a cache has no gradient", name_);
    const at::NoGradGuard no_graph;
    T saved;
    Output output = forward(state, input, context, saved);
    if (stash != nullptr) *stash = std::make_unique<T>(std::move(saved));
    return output;
  }
  at::Tensor input_gradient(const LayerState& state, Stash& stash,
                            const at::Tensor& output_gradient, InputGradient wanted) const final {
    const at::NoGradGuard no_graph;
    T& saved = advance<T>(stash, Saved::Phase::kForward, name_);
    at::Tensor gradient = input_gradient(state, saved, output_gradient, wanted);
    if (state.frozen) clear(saved);
    return gradient;
  }
  void weight_gradient(LayerState& state, Stash& stash) const final {
    const at::NoGradGuard no_graph;
    T& saved = advance<T>(stash, Saved::Phase::kInputDone, name_);
    if (!state.frozen) weight_gradient(state, saved);
    clear(saved);
  }

 private:
  virtual Output forward(const LayerState& state, const Hidden& input, const LayerContext& context,
                         T& saved) const = 0;
  virtual at::Tensor input_gradient(const LayerState& state, T& saved,
                                    const at::Tensor& output_gradient,
                                    InputGradient wanted) const = 0;
  virtual void weight_gradient(LayerState& state, T& saved) const = 0;

  static void clear(T& saved) {
    const Saved::Phase phase = saved.phase;
    saved = T();
    saved.phase = phase;
  }

  std::string name_;
  std::vector<ParameterSpec> specs_;
};

// Returns the operand of the layer's parameter i, for uses other than products: norms, tables of
// vectors.
inline const at::Tensor& value(const LayerState& state, std::size_t i) {
  return compute_value(state.parameters[i]);
}

// A layer multiplies with a matrix W of its own only by the products below. So another format of W
// needs no other layer. W is [O, I] as in Hugging Face's Linear. In GPT-2's Conv1D it is [I, O]:
// forward is times_transposed and backward is times. If W is compressed (pruned.h), the products
// use its kept weights.

// Returns x W^T.
inline at::Tensor times(const Parameter& parameter, const at::Tensor& x_NI) {
  if (parameter.pattern) return kernels::sparse::times(*parameter.pattern, parameter.value, x_NI);
  return at::linear(x_NI, compute_value(parameter));
}
// Returns y W, plus a vector if one is given.
inline at::Tensor times_transposed(const Parameter& parameter, const at::Tensor& y_NO) {
  if (parameter.pattern)
    return kernels::sparse::times_transposed(*parameter.pattern, parameter.value, y_NO);
  return at::mm(y_NO, compute_value(parameter));
}
inline at::Tensor times_transposed(const Parameter& parameter, const at::Tensor& y_NO,
                                   const Parameter& bias) {
  if (parameter.pattern) return times_transposed(parameter, y_NO).add_(compute_value(bias));
  return at::addmm(compute_value(bias), y_NO, compute_value(parameter));
}
// Adds y W to `sum_NI`, in place: one product, no temporary.
inline void add_times_transposed(at::Tensor& sum_NI, const Parameter& parameter,
                                 const at::Tensor& y_NO) {
  if (parameter.pattern) {
    kernels::sparse::add_times_transposed(sum_NI, *parameter.pattern, parameter.value, y_NO);
  } else {
    sum_NI.addmm_(y_NO, compute_value(parameter));
  }
}
// Adds dy^T x to the gradient, in place: one product, no temporary. If no kernel adds a bf16
// product to fp32, the product is rounded to bf16 before it is added.
inline void add_product(Parameter& parameter, const at::Tensor& dy_NO, const at::Tensor& x_NI) {
  if (x_NI.size(0) == 0) return;
  if (parameter.pattern) {
    kernels::sparse::add_product(*parameter.pattern, parameter.gradient, dy_NO, x_NI);
  } else if (dy_NO.scalar_type() != at::kBFloat16) {
    parameter.gradient.addmm_(dy_NO.t(), x_NI);
  } else if (dy_NO.is_cpu() && kernels::has_products<c10::BFloat16>()) {
    kernels::add_product(parameter.gradient, dy_NO, x_NI);
  } else {
    kernels::generic::add_product(parameter.gradient, dy_NO, x_NI);
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

// Adds each row of `from` to the row of gradient_VD that its token names. On the CPU rows are added
// in the order of the tokens, with any number of threads. On other devices the order may vary.
inline void add_rows(at::Tensor& gradient_VD, const at::Tensor& tokens, const at::Tensor& from) {
  if (!gradient_VD.is_cpu()) return kernels::generic::add_rows(gradient_VD, tokens, from);
  if (gradient_VD.scalar_type() == at::kDouble) {
    add_rows_of<double>(gradient_VD, tokens.contiguous(), from.contiguous());
  } else if (from.scalar_type() == at::kBFloat16) {
    add_rows_of<float, at::BFloat16>(gradient_VD, tokens.contiguous(), from.contiguous());
  } else {
    add_rows_of<float>(gradient_VD, tokens.contiguous(), from.contiguous());
  }
}

// Returns the number of tokens of a sequence that precede those of the input.
inline std::int64_t tokens_before(const LayerContext& context) {
  return context.cache == nullptr ? 0 : context.cache->tokens();
}

// Computes attention of the input's tokens to themselves and to those in the cache. If `left` is
// not null, it has the rows that are still here, and no cache is allowed.
inline kernels::Attention attend(LayerId layer, const LayerContext& context,
                                 const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                                 const at::Tensor& v_BTHK, const RowsLeft& left) {
  if (left) {
    DYNMO_CHECK(context.cache == nullptr, "layer {} reads whole texts, got a cache", layer);
    return attention_of_left(q_BTHK, k_BTHK, v_BTHK, left);
  }
  if (context.cache == nullptr) return kernels::causal_attention(q_BTHK, k_BTHK, v_BTHK);
  const KeyValueCache::KeyValues all = context.cache->append(layer, k_BTHK, v_BTHK);
  return kernels::causal_attention(q_BTHK, all.k_BTHK, all.v_BTHK);
}

// Computes the gradient of attend(). Requires that there was no cache.
inline kernels::AttentionGradient attend_gradient(
    const at::Tensor& gradient_BTHK, const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
    const at::Tensor& v_BTHK, const kernels::Attention& attention, const RowsLeft& left) {
  return left
             ? attention_of_left_gradient(gradient_BTHK, q_BTHK, k_BTHK, v_BTHK, attention, left)
             : kernels::causal_attention_gradient(gradient_BTHK, q_BTHK, k_BTHK, v_BTHK, attention);
}

// Returns the pairs that the pattern chooses for an attention layer. Sets the output's figures, or
// later_figures on a device.
inline kernels::Selection select(const AttentionPattern& pattern, const Hidden& input,
                                 const at::Tensor& q_BTHK, const LayerState& state,
                                 const LayerContext& context, Output& output) {
  DYNMO_CHECK(!input.rows.defined(), "layer {} chooses of whole sequences", state.id);
  DYNMO_CHECK(context.cache == nullptr, "layer {} reads whole texts, got a cache", state.id);
  kernels::Selection selection = pattern.select(q_BTHK, state, context);
  if (q_BTHK.is_cpu()) {
    output.figures = pattern_figures_of(q_BTHK, selection);
  } else {
    const at::Tensor pairs = selection.pairs.to(at::kDouble);
    output.later_figures =
        at::stack({pairs, at::full({}, causal_pairs_of(q_BTHK), pairs.options())});
  }
  return selection;
}

// Ends the forward pass of a half block: returns x + dropout(update), [N, D]. The result uses the
// memory of the update, or that of dropout's result.
inline at::Tensor with_residual(const at::Tensor& update_ND, const at::Tensor& mask, double p,
                                const at::Tensor& x_ND) {
  return masked(update_ND, mask, p).add_(x_ND);
}

// Returns the targets of the rows of `input`, [N].
inline at::Tensor targets_of(const Hidden& input, const LayerContext& context) {
  const at::Tensor all = context.targets_BT.reshape({-1});
  return input.rows.defined() ? all.index_select(0, input.rows.to(at::kLong)) : all;
}

// The loss at the end of a head, the cross entropy of n W^T, as its stash saves it.
struct SavedLoss {
  // Probabilities, fp32 also in bf16. gradient() replaces them by the gradient of the scores.
  at::Tensor scores_NV;
  at::Tensor targets_N;
  double weight = 0;  // weight of the loss in that of the step
  // Tokens of the micro-batch if some of its rows have left, else 0.
  std::int64_t tokens = 0;

  // Returns the mean loss over the micro-batch, a scalar. Rows that have left add nothing.
  [[nodiscard]] at::Tensor forward(const Parameter& head, const at::Tensor& n_ND,
                                   const Hidden& input, const LayerContext& context) {
    scores_NV = times(head, n_ND).to(kernels::accumulation_type(n_ND.scalar_type()));
    targets_N = targets_of(input, context);
    if (input.rows.defined()) tokens = context.targets_BT.numel();
    at::Tensor loss = kernels::cross_entropy(scores_NV, targets_N, tokens);
    // In the loss's type, as autograd would have it.
    weight = loss.scalar_type() == at::kFloat
                 ? static_cast<double>(static_cast<float>(context.loss_weight))
                 : context.loss_weight;
    return loss;
  }
  // Returns the gradient of n. d loss / d scores = (softmax - one-hot) / N, in the buffer that held
  // the probabilities.
  [[nodiscard]] at::Tensor gradient(const Parameter& head) {
    kernels::cross_entropy_gradient(scores_NV, targets_N, weight, tokens);
    targets_N.reset();
    scores_NV = scores_NV.to(compute_value(head).scalar_type());
    return times_transposed(head, scores_NV);
  }
};

}  // namespace dynmo::model
