// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/operations.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::model {
namespace {

// `Angle` is the type of table and arithmetic.
template <typename Scalar, typename Angle = Scalar>
void rotate_rows(at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine, Turn turn) {
  const std::int64_t half = x.size(3) / 2;
  const Angle sign = turn == Turn::kForward ? Angle{1} : Angle{-1};
  Scalar* row = x.data_ptr<Scalar>();
  for (std::int64_t b = 0; b < x.size(0); ++b) {
    for (std::int64_t t = 0; t < x.size(1); ++t) {
      const Angle* c = cosine.const_data_ptr<Angle>() + t * half;
      const Angle* s = sine.const_data_ptr<Angle>() + t * half;
      for (std::int64_t h = 0; h < x.size(2); ++h, row += 2 * half) {
        for (std::int64_t k = 0; k < half; ++k) {
          const Angle first = row[k];
          const Angle second = row[k + half];
          row[k] = static_cast<Scalar>(first * c[k] - sign * s[k] * second);
          row[k + half] = static_cast<Scalar>(second * c[k] + sign * s[k] * first);
        }
      }
    }
  }
}

// Query heads that share a key head, side by side.
at::Tensor repeated_heads(const at::Tensor& x_BTHK, std::int64_t heads) {
  if (x_BTHK.size(2) == heads) return x_BTHK;
  const std::int64_t group = heads / x_BTHK.size(2);
  return x_BTHK.unsqueeze(3)
      .expand({-1, -1, -1, group, -1})
      .reshape({x_BTHK.size(0), x_BTHK.size(1), heads, x_BTHK.size(3)});
}

// The gradient of repeated_heads.
at::Tensor summed_heads(const at::Tensor& gradient_BTHK, std::int64_t heads) {
  if (gradient_BTHK.size(2) == heads) return gradient_BTHK.contiguous();
  return gradient_BTHK
      .reshape({gradient_BTHK.size(0), gradient_BTHK.size(1), heads, -1, gradient_BTHK.size(3)})
      .sum(3);
}

}  // namespace

at::ScalarType statistics_type(at::ScalarType type) {
  return type == at::kBFloat16 ? at::kFloat : type;
}

at::Tensor inverse_rms(const at::Tensor& x_ND, double epsilon) {
  DYNMO_CHECK(x_ND.dim() == 2, "rows to normalise, got {} dimensions", x_ND.dim());
  return at::linalg_vector_norm(x_ND, 2, at::IntArrayRef{-1}, true,
                                statistics_type(x_ND.scalar_type()))
      .square_()
      .div_(x_ND.size(-1))
      .add_(epsilon)
      .rsqrt_();
}

at::Tensor normed(const at::Tensor& x_ND, const at::Tensor& inverse_N1,
                  const at::Tensor& weight_D) {
  return at::mul(x_ND, inverse_N1).mul_(weight_D).to(x_ND.scalar_type());
}

// With u = x * inverse: dweight = sum_N(dy * u), dx = inverse * (dy * w - u * mean_D(dy * w * u)).
NormGradient norm_gradient(const at::Tensor& gradient_ND, const at::Tensor& x_ND,
                           const at::Tensor& inverse_N1, const at::Tensor& weight_D,
                           Layer::InputGradient wanted) {
  const at::Tensor unit_ND = at::mul(x_ND, inverse_N1);
  const at::Tensor product_ND = at::mul(gradient_ND, unit_ND);
  NormGradient gradient{.x_ND = {}, .weight_D = product_ND.sum(0)};
  if (wanted == Layer::InputGradient::kWanted) {
    const at::Tensor factor_D = weight_D.to(unit_ND.scalar_type());
    const at::Tensor mean_N1 = at::mv(product_ND, factor_D).div_(factor_D.numel()).unsqueeze_(-1);
    gradient.x_ND = at::mul(gradient_ND, factor_D).addcmul_(unit_ND, mean_N1, -1).mul_(inverse_N1);
  }
  return gradient;
}

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

void rotate(at::Tensor& x_BTHK, const RotaryTable& table, Turn turn) {
  DYNMO_CHECK(x_BTHK.dim() == 4 && x_BTHK.is_cpu() && x_BTHK.is_contiguous(),
              "contiguous x_BTHK on the CPU, got {} dimensions", x_BTHK.dim());
  DYNMO_CHECK(x_BTHK.size(1) <= table.cosine.size(0) && x_BTHK.size(3) == 2 * table.cosine.size(1),
              "at most {} tokens and a head size of {}, got {} and {}", table.cosine.size(0),
              2 * table.cosine.size(1), x_BTHK.size(1), x_BTHK.size(3));
  if (x_BTHK.scalar_type() == at::kDouble) {
    rotate_rows<double>(x_BTHK, table.cosine, table.sine, turn);
  } else if (x_BTHK.scalar_type() == at::kBFloat16) {
    rotate_rows<at::BFloat16, float>(x_BTHK, table.cosine_float, table.sine_float, turn);
  } else {
    rotate_rows<float>(x_BTHK, table.cosine_float, table.sine_float, turn);
  }
}

// libtorch's fused kernel: as fast as explicit products on one thread at T = 128 and 256, bit-equal
// from call to call and for 1 or 2 threads, and it keeps no T x T probabilities.
Attention causal_attention(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                           const at::Tensor& v_BTHK) {
  const std::int64_t heads = q_BTHK.size(2);
  auto [out, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
      q_BTHK.transpose(1, 2), repeated_heads(k_BTHK, heads).transpose(1, 2),
      repeated_heads(v_BTHK, heads).transpose(1, 2), /*dropout_p=*/0.0, /*is_causal=*/true);
  return {.out_BTHK = out.transpose(1, 2), .log_sum_exp = std::move(log_sum_exp)};
}

AttentionGradient causal_attention_gradient(const at::Tensor& gradient_BTHK,
                                            const at::Tensor& q_BTHK, const at::Tensor& k_BTHK,
                                            const at::Tensor& v_BTHK, const Attention& attention) {
  const std::int64_t heads = q_BTHK.size(2);
  const auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient_BTHK.transpose(1, 2), q_BTHK.transpose(1, 2),
      repeated_heads(k_BTHK, heads).transpose(1, 2), repeated_heads(v_BTHK, heads).transpose(1, 2),
      attention.out_BTHK.transpose(1, 2), attention.log_sum_exp, /*dropout_p=*/0.0,
      /*is_causal=*/true);
  return {.q_BTHK = q.transpose(1, 2).contiguous(),
          .k_BTHK = summed_heads(k.transpose(1, 2), k_BTHK.size(2)),
          .v_BTHK = summed_heads(v.transpose(1, 2), v_BTHK.size(2))};
}

}  // namespace dynmo::model
