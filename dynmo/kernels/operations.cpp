// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/operations.h"

#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "dynmo/core/check.h"
#include "dynmo/kernels/attention_impl.h"
#include "dynmo/kernels/fused.h"
#include "dynmo/kernels/generic.h"
#include "dynmo/kernels/loops.h"

namespace dynmo::kernels {
namespace {

template <typename Element>
Element* data(at::Tensor& x) {
  return x.mutable_data_ptr<Element>();
}
template <typename Element>
const Element* data(const at::Tensor& x) {
  return x.const_data_ptr<Element>();
}

// Calls function(Element()) with the type of the tensors' elements.
template <typename Function>
void for_element_of(const at::Tensor& x, Function function) {
  DYNMO_CHECK(x.is_cpu() && x.is_contiguous(), "a contiguous tensor on the CPU, got strides {}",
              fmt::join(x.strides(), " "));
  switch (x.scalar_type()) {
    case at::kFloat:
      return function(float());
    case at::kDouble:
      return function(double());
    case at::kBFloat16:
      return function(at::BFloat16());
    default:
      DYNMO_CHECK(false, "fp32, fp64 or bf16, got {}", at::toString(x.scalar_type()));
  }
}

// Implements apply_rope() for a tensor of a device.
void rotate_on_device(at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine,
                      Rope direction) {
  if (fused::serves(x, {cosine, sine})) return fused::apply_rope(x, cosine, sine, direction);
  generic::apply_rope(x, cosine, sine, direction);
}

template <typename Element>
void rotate_rows(at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine, Rope direction) {
  using Wide = loops::Wide<Element>;
  const std::int64_t half = x.size(3) / 2;
  Element* row = data<Element>(x);
  for (std::int64_t b = 0; b < x.size(0); ++b) {
    for (std::int64_t t = 0; t < x.size(1); ++t, row += x.size(2) * x.size(3)) {
      loops::apply_rope(row, data<Wide>(cosine) + t * half, data<Wide>(sine) + t * half,
                        direction == Rope::kForward ? Wide(1) : Wide(-1), x.size(2), half);
    }
  }
}

// Computes attention of fewer queries than keys. A query sees the keys up to its own position.
Attention attention_of_last(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                            const at::Tensor& v_BTHK) {
  const std::int64_t queries = q_BTHK.size(1);
  const std::int64_t keys = k_BTHK.size(1);
  const at::Tensor seen =
      at::ones({queries, keys}, q_BTHK.options().dtype(at::kBool)).tril(keys - queries);
  const at::Tensor out = at::scaled_dot_product_attention(
      q_BTHK.transpose(1, 2), k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2), seen);
  return {.out_BTHK = out.transpose(1, 2), .log_sum_exp = {}};
}

}  // namespace

at::Tensor repeated_heads(const at::Tensor& x_BTHK, std::int64_t heads) {
  if (x_BTHK.size(2) == heads) return x_BTHK;
  const std::int64_t group = heads / x_BTHK.size(2);
  return x_BTHK.unsqueeze(3)
      .expand({-1, -1, -1, group, -1})
      .reshape({x_BTHK.size(0), x_BTHK.size(1), heads, x_BTHK.size(3)});
}

at::Tensor summed_heads(const at::Tensor& gradient_BTHK, std::int64_t heads) {
  if (gradient_BTHK.size(2) == heads) return gradient_BTHK.contiguous();
  return gradient_BTHK
      .reshape({gradient_BTHK.size(0), gradient_BTHK.size(1), heads, -1, gradient_BTHK.size(3)})
      .sum(3);
}

class RotaryTable::Copies {
 public:
  Angles of(const Angles& angles, at::Device device) {
    const std::lock_guard lock(mutex_);
    const auto [found, fresh] =
        copies_.try_emplace({angles.cosine.scalar_type(), device.type(), device.index()});
    if (fresh) found->second = {angles.cosine.to(device), angles.sine.to(device)};
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<at::ScalarType, at::DeviceType, at::DeviceIndex>, Angles> copies_;
};

RotaryTable::Angles RotaryTable::of(const at::Tensor& like) const {
  const Angles& angles = like.scalar_type() == at::kDouble ? doubles : floats;
  return like.is_cpu() ? angles : copies->of(angles, like.device());
}

at::ScalarType accumulation_type(at::ScalarType type) {
  return type == at::kBFloat16 ? at::kFloat : type;
}
at::Tensor wide(const at::Tensor& x) { return x.to(accumulation_type(x.scalar_type())); }

Normed rms_norm(const at::Tensor& x_ND, const at::Tensor& weight_D, double epsilon) {
  DYNMO_CHECK(x_ND.dim() == 2, "rows to normalise, got {} dimensions", x_ND.dim());
  if (!x_ND.is_cpu()) return generic::rms_norm(x_ND, weight_D, epsilon);
  at::Tensor inverse_N1 =
      at::empty({x_ND.size(0), 1}, x_ND.options().dtype(accumulation_type(x_ND.scalar_type())));
  for_element_of(x_ND, [&](auto element) {
    using Element = decltype(element);
    loops::rstd(data<Element>(x_ND), x_ND.size(0), x_ND.size(1), epsilon,
                data<loops::Wide<Element>>(inverse_N1));
  });
  at::Tensor y_ND = normed_again(x_ND, inverse_N1, weight_D, epsilon);
  return {.y_ND = std::move(y_ND), .inverse_N1 = std::move(inverse_N1)};
}

at::Tensor normed_again(const at::Tensor& x_ND, const at::Tensor& inverse_N1,
                        const at::Tensor& weight_D, double epsilon) {
  if (!x_ND.is_cpu()) return generic::normed_again(x_ND, inverse_N1, weight_D, epsilon);
  at::Tensor y_ND = at::empty_like(x_ND);
  for_element_of(x_ND, [&](auto element) {
    using Element = decltype(element);
    loops::rms_norm(data<Element>(x_ND), data<loops::Wide<Element>>(inverse_N1),
                    data<Element>(weight_D), x_ND.size(0), x_ND.size(1), data<Element>(y_ND));
  });
  return y_ND;
}

NormGradient norm_gradient(const at::Tensor& gradient_ND, const at::Tensor& x_ND,
                           const at::Tensor& inverse_N1, const at::Tensor& weight_D,
                           InputGradient wanted, const at::Tensor& residual_ND) {
  DYNMO_CHECK(gradient_ND.is_contiguous(), "a contiguous gradient");
  if (!x_ND.is_cpu()) {
    const bool typed = gradient_ND.scalar_type() == x_ND.scalar_type() &&
                       weight_D.scalar_type() == x_ND.scalar_type() &&
                       (!residual_ND.defined() || residual_ND.scalar_type() == x_ND.scalar_type());
    return typed && fused::serves(x_ND, {gradient_ND, inverse_N1, weight_D, residual_ND})
               ? fused::norm_gradient(gradient_ND, x_ND, inverse_N1, weight_D, wanted, residual_ND)
               : generic::norm_gradient(gradient_ND, x_ND, inverse_N1, weight_D, wanted,
                                        residual_ND);
  }
  const at::Tensor residual = residual_ND.defined() ? residual_ND.contiguous() : residual_ND;
  const auto wide = x_ND.options().dtype(accumulation_type(x_ND.scalar_type()));
  NormGradient gradient{.x_ND = {}, .weight_D = at::empty({x_ND.size(1)}, wide)};
  at::Tensor partial = at::empty({x_ND.size(1)}, wide);
  if (wanted == InputGradient::kWanted) gradient.x_ND = at::empty_like(x_ND);
  for_element_of(x_ND, [&](auto element) {
    using Element = decltype(element);
    using Wide = loops::Wide<Element>;
    loops::norm_gradient(data<Element>(gradient_ND), data<Element>(x_ND), data<Wide>(inverse_N1),
                         data<Element>(weight_D),
                         residual.defined() ? data<Element>(residual) : nullptr, x_ND.size(0),
                         x_ND.size(1),
                         gradient.x_ND.defined() ? data<Element>(gradient.x_ND) : nullptr,
                         data<Wide>(gradient.weight_D), data<Wide>(partial));
  });
  return gradient;
}

at::Tensor swiglu(const at::Tensor& gate_NF, const at::Tensor& up_NF) {
  DYNMO_CHECK(up_NF.is_contiguous() && up_NF.sizes() == gate_NF.sizes(), "gate and up alike");
  if (!gate_NF.is_cpu()) {
    return fused::serves(gate_NF, {up_NF}) ? fused::swiglu(gate_NF, up_NF)
                                           : generic::swiglu(gate_NF, up_NF);
  }
  at::Tensor product_NF = at::empty_like(gate_NF);
  for_element_of(gate_NF, [&](auto element) {
    using Element = decltype(element);
    loops::swiglu(data<Element>(gate_NF), data<Element>(up_NF), gate_NF.numel(),
                  data<Element>(product_NF));
  });
  return product_NF;
}

void swiglu_gradient(at::Tensor& gate_NF, at::Tensor& up_NF, at::Tensor& product_NF) {
  DYNMO_CHECK(up_NF.is_contiguous() && product_NF.is_contiguous() &&
                  up_NF.sizes() == gate_NF.sizes() && product_NF.sizes() == gate_NF.sizes(),
              "gate, up and product alike");
  if (!gate_NF.is_cpu()) {
    return fused::serves(gate_NF, {up_NF, product_NF})
               ? fused::swiglu_gradient(gate_NF, up_NF, product_NF)
               : generic::swiglu_gradient(gate_NF, up_NF, product_NF);
  }
  for_element_of(gate_NF, [&](auto element) {
    using Element = decltype(element);
    loops::swiglu_gradient(data<Element>(gate_NF), data<Element>(up_NF), data<Element>(product_NF),
                           gate_NF.numel());
  });
}

at::Tensor softmax(at::Tensor& scores_NV) {
  if (!scores_NV.is_cpu()) return generic::softmax(scores_NV);
  at::Tensor log_sum_N = at::empty({scores_NV.size(0)}, scores_NV.options());
  const std::vector<std::int64_t> all(static_cast<std::size_t>(scores_NV.size(0)),
                                      scores_NV.size(1));
  const auto make = [&](auto element) {
    using Element = decltype(element);
    loops::causal_softmax(data<Element>(scores_NV), scores_NV.size(0), all.data(),
                          scores_NV.size(1), data<Element>(scores_NV), data<Element>(log_sum_N));
  };
  DYNMO_CHECK(scores_NV.is_contiguous() && scores_NV.scalar_type() != at::kBFloat16,
              "contiguous scores of fp32 or fp64, got {}", at::toString(scores_NV.scalar_type()));
  if (scores_NV.scalar_type() == at::kDouble) {
    make(double());
  } else {
    make(float());
  }
  return log_sum_N;
}

at::Tensor cross_entropy(at::Tensor& scores_NV, const at::Tensor& targets_N, std::int64_t tokens) {
  const std::int64_t rows = scores_NV.size(0);
  const std::int64_t width = scores_NV.size(1);
  DYNMO_CHECK(targets_N.is_contiguous() && targets_N.numel() == rows, "{} targets, got {}", rows,
              targets_N.numel());
  if (!scores_NV.is_cpu()) {
    return fused::serves(scores_NV) ? fused::cross_entropy(scores_NV, targets_N, tokens)
                                    : generic::cross_entropy(scores_NV, targets_N, tokens);
  }
  const auto* targets = data<std::int64_t>(targets_N);
  for (std::int64_t n = 0; n < rows; ++n) {
    DYNMO_CHECK(targets[n] >= 0 && targets[n] < width, "targets 0 to {}, got {}", width - 1,
                targets[n]);
  }
  double total = 0;
  for_element_of(scores_NV, [&](auto element) {
    total = loops::cross_entropy(data<decltype(element)>(scores_NV), targets, rows, width);
  });
  return at::scalar_tensor(total / static_cast<double>(tokens > 0 ? tokens : rows),
                           scores_NV.options().dtype(accumulation_type(scores_NV.scalar_type())));
}

void cross_entropy_gradient(at::Tensor& probabilities_NV, const at::Tensor& targets_N,
                            double gradient, std::int64_t tokens) {
  if (!probabilities_NV.is_cpu()) {
    return fused::serves(probabilities_NV)
               ? fused::cross_entropy_gradient(probabilities_NV, targets_N, gradient, tokens)
               : generic::cross_entropy_gradient(probabilities_NV, targets_N, gradient, tokens);
  }
  const std::int64_t rows = probabilities_NV.size(0);
  for_element_of(probabilities_NV, [&](auto element) {
    loops::cross_entropy_gradient(data<decltype(element)>(probabilities_NV),
                                  data<std::int64_t>(targets_N), rows, probabilities_NV.size(1),
                                  gradient / static_cast<double>(tokens > 0 ? tokens : rows));
  });
}

RotaryTable rotary_table(std::int64_t positions, const std::vector<double>& frequencies) {
  const std::int64_t half = std::ssize(frequencies);
  RotaryTable table{.doubles = {at::empty({positions, half}, at::kDouble),
                                at::empty({positions, half}, at::kDouble)},
                    .floats = {},
                    .copies = std::make_shared<RotaryTable::Copies>()};
  for (std::int64_t k = 0; k < half; ++k) {
    const double frequency = frequencies[static_cast<std::size_t>(k)];
    for (std::int64_t t = 0; t < positions; ++t) {
      const double angle = static_cast<double>(t) * frequency;
      table.doubles.cosine.data_ptr<double>()[t * half + k] = std::cos(angle);
      table.doubles.sine.data_ptr<double>()[t * half + k] = std::sin(angle);
    }
  }
  table.floats = {table.doubles.cosine.to(at::kFloat), table.doubles.sine.to(at::kFloat)};
  return table;
}

void apply_rope(at::Tensor& x_BTHK, const RotaryTable& table, Rope direction, std::int64_t first) {
  DYNMO_CHECK(x_BTHK.dim() == 4 && x_BTHK.is_contiguous(), "contiguous x_BTHK, got {} dimensions",
              x_BTHK.dim());
  const at::Tensor& all = table.doubles.cosine;
  const std::int64_t tokens = x_BTHK.size(1);
  DYNMO_CHECK(first >= 0 && first + tokens <= all.size(0) && x_BTHK.size(3) == 2 * all.size(1),
              "at most {} tokens and a head size of {}, got {} and {}", all.size(0),
              2 * all.size(1), first + tokens, x_BTHK.size(3));
  const RotaryTable::Angles angles = table.of(x_BTHK);
  const at::Tensor cosine = angles.cosine.narrow(0, first, tokens);
  const at::Tensor sine = angles.sine.narrow(0, first, tokens);
  if (!x_BTHK.is_cpu()) return rotate_on_device(x_BTHK, cosine, sine, direction);
  for_element_of(x_BTHK, [&](auto element) {
    rotate_rows<decltype(element)>(x_BTHK, cosine, sine, direction);
  });
}

void apply_rope(at::Tensor& x_BTHK, const RotaryTable& table, Rope direction,
                const at::Tensor& positions_BT) {
  DYNMO_CHECK(x_BTHK.dim() == 4 && x_BTHK.is_contiguous(), "contiguous x_BTHK, got {} dimensions",
              x_BTHK.dim());
  DYNMO_CHECK(positions_BT.numel() == x_BTHK.size(0) * x_BTHK.size(1), "{} x {} positions, got {}",
              x_BTHK.size(0), x_BTHK.size(1), positions_BT.numel());
  const RotaryTable::Angles angles = table.of(x_BTHK);
  const at::Tensor positions = positions_BT.flatten();
  const at::Tensor cosine = angles.cosine.index_select(0, positions);
  const at::Tensor sine = angles.sine.index_select(0, positions);
  at::Tensor x_1NHK = x_BTHK.view({1, positions.numel(), x_BTHK.size(2), x_BTHK.size(3)});
  if (!x_BTHK.is_cpu()) return rotate_on_device(x_1NHK, cosine, sine, direction);
  for_element_of(x_1NHK, [&](auto element) {
    rotate_rows<decltype(element)>(x_1NHK, cosine, sine, direction);
  });
}

// If libtorch has no BLAS to call, its fused kernel serves the CPU. It keeps no T x T
// probabilities, either.
Attention causal_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                           const at::Tensor& v_BTHK) {
  if (q_BTHK.is_cpu() && has_blocked_attention(q_BTHK.scalar_type())) {
    return blocked_attention(q_BTHK, k_BTHK, v_BTHK);
  }
  const std::int64_t heads = q_BTHK.size(2);
  const at::Tensor keys_BTHK = repeated_heads(k_BTHK, heads);
  const at::Tensor values_BTHK = repeated_heads(v_BTHK, heads);
  if (q_BTHK.size(1) < k_BTHK.size(1)) return attention_of_last(q_BTHK, keys_BTHK, values_BTHK);
  if (!q_BTHK.is_cpu()) return generic::causal_attention(q_BTHK, keys_BTHK, values_BTHK);
  auto [out, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
      q_BTHK.transpose(1, 2), keys_BTHK.transpose(1, 2), values_BTHK.transpose(1, 2),
      /*dropout_p=*/0.0, /*is_causal=*/true);
  return {.out_BTHK = out.transpose(1, 2), .log_sum_exp = std::move(log_sum_exp)};
}

AttentionGradient causal_attention_gradient(const at::Tensor& gradient_BTHK,
                                            const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                                            const at::Tensor& v_BTHK, const Attention& attention) {
  if (q_BTHK.is_cpu() && has_blocked_attention(q_BTHK.scalar_type())) {
    return blocked_attention_gradient(gradient_BTHK, q_BTHK, k_BTHK, v_BTHK, attention);
  }
  const std::int64_t heads = q_BTHK.size(2);
  const at::Tensor keys_BTHK = repeated_heads(k_BTHK, heads);
  const at::Tensor values_BTHK = repeated_heads(v_BTHK, heads);
  if (!q_BTHK.is_cpu()) {
    AttentionGradient gradient = generic::causal_attention_gradient(
        gradient_BTHK, q_BTHK, keys_BTHK, values_BTHK, attention);
    gradient.k_BTHK = summed_heads(gradient.k_BTHK, k_BTHK.size(2));
    gradient.v_BTHK = summed_heads(gradient.v_BTHK, v_BTHK.size(2));
    return gradient;
  }
  const auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient_BTHK.transpose(1, 2), q_BTHK.transpose(1, 2), keys_BTHK.transpose(1, 2),
      values_BTHK.transpose(1, 2), attention.out_BTHK.transpose(1, 2), attention.log_sum_exp,
      /*dropout_p=*/0.0, /*is_causal=*/true);
  return {.q_BTHK = q.transpose(1, 2).contiguous(),
          .k_BTHK = summed_heads(k.transpose(1, 2), k_BTHK.size(2)),
          .v_BTHK = summed_heads(v.transpose(1, 2), v_BTHK.size(2))};
}

}  // namespace dynmo::kernels
