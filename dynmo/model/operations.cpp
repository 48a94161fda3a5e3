// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/operations.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "dynmo/core/check.h"

namespace dynmo::model {
namespace {

namespace autograd = torch::autograd;
using autograd::AutogradContext;
using autograd::variable_list;

struct RmsNorm : autograd::Function<RmsNorm> {
  static at::Tensor forward(AutogradContext* saved, const at::Tensor& x_ND,
                            const at::Tensor& weight_D, double epsilon) {
    const at::Tensor inverse_N1 = at::linalg_vector_norm(x_ND, 2, at::IntArrayRef{-1}, true)
                                      .square_()
                                      .div_(x_ND.size(-1))
                                      .add_(epsilon)
                                      .rsqrt_();
    saved->save_for_backward({x_ND, weight_D, inverse_N1});
    return at::mul(x_ND, inverse_N1).mul_(weight_D);
  }
  // With u = x * inverse: dweight = sum_N(dy * u), dx = inverse * (dy * w - u * mean_D(dy * w *
  // u)).
  static variable_list backward(AutogradContext* saved, const variable_list& gradients) {
    const variable_list kept = saved->get_saved_variables();
    const at::Tensor& weight_D = kept[1];
    const at::Tensor& inverse_N1 = kept[2];
    const at::Tensor unit_ND = at::mul(kept[0], inverse_N1);
    const at::Tensor product_ND = at::mul(gradients[0], unit_ND);
    at::Tensor x_gradient;
    if (saved->needs_input_grad(0)) {
      const at::Tensor mean_N1 = at::mv(product_ND, weight_D).div_(weight_D.numel()).unsqueeze_(-1);
      x_gradient = at::mul(gradients[0], weight_D).addcmul_(unit_ND, mean_N1, -1).mul_(inverse_N1);
    }
    at::Tensor weight_gradient;
    if (saved->needs_input_grad(1)) weight_gradient = product_ND.sum(0);
    return {x_gradient, weight_gradient, {}};
  }
};

struct Swiglu : autograd::Function<Swiglu> {
  static at::Tensor forward(AutogradContext* saved, const at::Tensor& gate, const at::Tensor& up) {
    saved->save_for_backward({gate, up});
    return at::silu(gate).mul_(up);
  }
  static variable_list backward(AutogradContext* saved, const variable_list& gradients) {
    const variable_list kept = saved->get_saved_variables();
    return {at::silu_backward(at::mul(gradients[0], kept[1]), kept[0]),
            at::silu(kept[0]).mul_(gradients[0])};
  }
};

enum class Turn { kForward, kBack };

template <typename Scalar>
void rotate_into(at::Tensor& out, const at::Tensor& x, const at::Tensor& cosine,
                 const at::Tensor& sine, Turn turn) {
  const std::int64_t half = x.size(3) / 2;
  const Scalar sign = turn == Turn::kForward ? Scalar{1} : Scalar{-1};
  Scalar* to = out.data_ptr<Scalar>();
  for (std::int64_t b = 0; b < x.size(0); ++b) {
    for (std::int64_t t = 0; t < x.size(1); ++t) {
      const Scalar* c = cosine.const_data_ptr<Scalar>() + t * half;
      const Scalar* s = sine.const_data_ptr<Scalar>() + t * half;
      for (std::int64_t h = 0; h < x.size(2); ++h, to += 2 * half) {
        const Scalar* from =
            x.const_data_ptr<Scalar>() + b * x.stride(0) + t * x.stride(1) + h * x.stride(2);
        for (std::int64_t k = 0; k < half; ++k) {
          const Scalar first = from[k];
          const Scalar second = from[k + half];
          to[k] = first * c[k] - sign * s[k] * second;
          to[k + half] = second * c[k] + sign * s[k] * first;
        }
      }
    }
  }
}

at::Tensor rotated(const at::Tensor& given, const at::Tensor& cosine, const at::Tensor& sine,
                   Turn turn) {
  const at::Tensor x = given.stride(3) == 1 ? given : given.contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (x.scalar_type() == at::kDouble) {
    rotate_into<double>(out, x, cosine, sine, turn);
  } else {
    rotate_into<float>(out, x, cosine, sine, turn);
  }
  return out;
}

struct Rotate : autograd::Function<Rotate> {
  static at::Tensor forward(AutogradContext* saved, const at::Tensor& x, const at::Tensor& cosine,
                            const at::Tensor& sine) {
    saved->save_for_backward({cosine, sine});
    return rotated(x, cosine, sine, Turn::kForward);
  }
  static variable_list backward(AutogradContext* saved, const variable_list& gradients) {
    const variable_list kept = saved->get_saved_variables();
    return {rotated(gradients[0], kept[0], kept[1], Turn::kBack), {}, {}};
  }
};

struct MeanCrossEntropy : autograd::Function<MeanCrossEntropy> {
  static at::Tensor forward(AutogradContext* saved, const at::Tensor& logits_NV,
                            const at::Tensor& targets_N) {
    const at::Tensor log_p_NV = at::log_softmax(logits_NV, -1);
    const at::Tensor targets_N1 = targets_N.unsqueeze(-1);
    saved->save_for_backward({log_p_NV, targets_N1});
    return log_p_NV.gather(1, targets_N1).mean().neg_();
  }
  // (softmax - one-hot) / N, in the one buffer it needs.
  static variable_list backward(AutogradContext* saved, const variable_list& gradients) {
    const variable_list kept = saved->get_saved_variables();
    const at::Tensor& targets_N1 = kept[1];
    at::Tensor gradient_NV = at::exp(kept[0]);
    gradient_NV.scatter_add_(1, targets_N1, at::full_like(targets_N1, -1, gradient_NV.options()));
    gradient_NV.mul_(gradients[0] / targets_N1.numel());
    return {gradient_NV, {}};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x_ND, const at::Tensor& weight_D, double epsilon) {
  DYNMO_CHECK(x_ND.dim() == 2, "rows to normalise, got {} dimensions", x_ND.dim());
  return RmsNorm::apply(x_ND, weight_D, epsilon);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return Swiglu::apply(gate, up); }

RotaryTable rotary_table(std::int64_t positions, std::int64_t head_size, double theta) {
  DYNMO_CHECK(head_size % 2 == 0, "an even head size, got {}", head_size);
  const std::int64_t half = head_size / 2;
  RotaryTable table{.cosine = at::empty({positions, half}, at::kDouble),
                    .sine = at::empty({positions, half}, at::kDouble),
                    .cosine_float = {},
                    .sine_float = {}};
  for (std::int64_t k = 0; k < half; ++k) {
    const double frequency =
        std::pow(theta, -2.0 * static_cast<double>(k) / static_cast<double>(head_size));
    for (std::int64_t t = 0; t < positions; ++t) {
      const double angle = static_cast<double>(t) * frequency;
      table.cosine.data_ptr<double>()[t * half + k] = std::cos(angle);
      table.sine.data_ptr<double>()[t * half + k] = std::sin(angle);
    }
  }
  table.cosine_float = table.cosine.to(at::kFloat);
  table.sine_float = table.sine.to(at::kFloat);
  return table;
}

at::Tensor rotate(const at::Tensor& x_BTHK, const RotaryTable& table) {
  DYNMO_CHECK(x_BTHK.dim() == 4 && x_BTHK.is_cpu(), "x_BTHK on the CPU, got {} dimensions",
              x_BTHK.dim());
  DYNMO_CHECK(x_BTHK.size(1) <= table.cosine.size(0) && x_BTHK.size(3) == 2 * table.cosine.size(1),
              "at most {} tokens and a head size of {}, got {} and {}", table.cosine.size(0),
              2 * table.cosine.size(1), x_BTHK.size(1), x_BTHK.size(3));
  return x_BTHK.scalar_type() == at::kDouble
             ? Rotate::apply(x_BTHK, table.cosine, table.sine)
             : Rotate::apply(x_BTHK, table.cosine_float, table.sine_float);
}

// libtorch's fused kernel: as fast as explicit products on one thread at T = 128 and 256, bit-equal
// from call to call and for 1 or 2 threads, and it keeps no T x T probabilities.
at::Tensor causal_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                            const at::Tensor& v_BTHK) {
  const bool grouped = q_BTHK.size(2) != k_BTHK.size(2);
  return at::scaled_dot_product_attention(q_BTHK.transpose(1, 2), k_BTHK.transpose(1, 2),
                                          v_BTHK.transpose(1, 2), /*attn_mask=*/{},
                                          /*dropout_p=*/0.0, /*is_causal=*/true,
                                          /*scale=*/std::nullopt, /*enable_gqa=*/grouped)
      .transpose(1, 2);
}

at::Tensor mean_cross_entropy(const at::Tensor& logits_NV, const at::Tensor& targets_N) {
  return MeanCrossEntropy::apply(logits_NV, targets_N);
}

}  // namespace dynmo::model
