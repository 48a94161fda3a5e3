// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/generic.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

#include <array>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::kernels {

bool has_kernel(const char* name, const at::Tensor& x, const char* overload) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  return op && op->hasKernelForDispatchKey(c10::legacyExtractDispatchKey(x.key_set()));
}

}  // namespace dynmo::kernels

namespace dynmo::kernels::generic {
namespace {

using at::Tensor;

Fused fused_attention(const Tensor& q_BHTK, const Tensor& k_BHTK, const Tensor& v_BHTK) {
  // A device with one of the operations for whole sequences has all of them.
  constexpr const char* kOne = "aten::_scaled_dot_product_flash_attention";
  return has_kernel(kOne, q_BHTK) ? fused_choice(q_BHTK, k_BHTK, v_BHTK) : Fused::kNone;
}

// Returns whether libtorch has a fused kernel for this norm. CUDA's kernels need rows and weight of
// one type.
bool has_fused_norm(const Tensor& x_ND, const Tensor& weight_D) {
  return x_ND.scalar_type() == weight_D.scalar_type() && has_kernel("aten::_fused_rms_norm", x_ND);
}
// Excludes bf16, for which the kernel would round the weight's gradient before micro-batches are
// summed, and that of x before the residual is added. Losses would then differ from the CPU's by
// more than rounding.
bool has_fused_norm_gradient(const Tensor& gradient_ND, const Tensor& x_ND,
                             const Tensor& weight_D) {
  return x_ND.scalar_type() == accumulation_type(x_ND.scalar_type()) &&
         x_ND.scalar_type() == weight_D.scalar_type() &&
         x_ND.scalar_type() == gradient_ND.scalar_type() &&
         has_kernel("aten::_fused_rms_norm_backward", x_ND);
}

// Returns the gradients by libtorch's kernel.
NormGradient fused_norm_gradient(const Tensor& gradient_ND, const Tensor& x_ND,
                                 const Tensor& inverse_N1, const Tensor& weight_D,
                                 InputGradient wanted, const Tensor& residual_ND) {
  const bool of_x = wanted == InputGradient::kWanted;
  NormGradient gradient;
  std::tie(gradient.x_ND, gradient.weight_D) =
      at::_fused_rms_norm_backward(gradient_ND, x_ND, {x_ND.size(1)}, inverse_N1, weight_D,
                                   /*output_mask=*/{of_x, true});
  if (of_x && residual_ND.defined()) gradient.x_ND.add_(residual_ND);
  return gradient;
}

// Returns the scores of each query and key in accumulation_type, [B, H, T, T]. A key that the query
// does not see has -inf.
Tensor scores_of(const Tensor& q_BHTK, const Tensor& k_BHTK) {
  const std::int64_t tokens = q_BHTK.size(2);
  const double scale = 1 / std::sqrt(static_cast<double>(q_BHTK.size(3)));
  const Tensor later =
      at::ones({tokens, tokens}, q_BHTK.options().dtype(at::kBool)).triu_(/*diagonal=*/1);
  return at::matmul(wide(q_BHTK), wide(k_BHTK).transpose(2, 3))
      .mul_(scale)
      .masked_fill_(later, -std::numeric_limits<double>::infinity());
}

// Returns the high and the low half of the 64-bit products of 32-bit words, each in an int64. A
// product may wrap into the sign, which the mask removes.
constexpr std::int64_t kWord = 0xFFFFFFFF;
std::pair<Tensor, Tensor> product_of(const Tensor& words, std::int64_t factor) {
  const Tensor product = words * factor;
  return {product.bitwise_right_shift(32).bitwise_and_(kWord), product.bitwise_and(kWord)};
}

}  // namespace

Fused fused_choice(const Tensor& q_BHTK, const Tensor& k_BHTK, const Tensor& v_BHTK) {
  // The choice is made for the forward pass. Some of its devices have no backward pass for heads
  // above 128 elements.
  if (q_BHTK.size(3) % 8 != 0 || q_BHTK.size(3) > 128) return Fused::kNone;
  const auto chosen = static_cast<Fused>(at::_fused_sdp_choice(
      q_BHTK, k_BHTK, v_BHTK, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true));
  const bool known =
      chosen == Fused::kFlash || chosen == Fused::kEfficient || chosen == Fused::kCudnn;
  return known ? chosen : Fused::kNone;
}

Normed rms_norm(const Tensor& x_ND, const Tensor& weight_D, double epsilon) {
  if (has_fused_norm(x_ND, weight_D)) {
    const auto [y_ND, inverse_N1] = at::_fused_rms_norm(x_ND, {x_ND.size(1)}, weight_D, epsilon);
    return {.y_ND = y_ND, .inverse_N1 = inverse_N1};
  }
  const auto size = static_cast<double>(x_ND.size(-1));
  const Tensor inverse_N1 =
      at::linalg_vector_norm(x_ND, 2, {-1}, /*keepdim=*/true, accumulation_type(x_ND.scalar_type()))
          .square_()
          .div_(size)
          .add_(epsilon)
          .rsqrt_();
  return {.y_ND = normed_again(x_ND, inverse_N1, weight_D, epsilon), .inverse_N1 = inverse_N1};
}

Tensor normed_again(const Tensor& x_ND, const Tensor& inverse_N1, const Tensor& weight_D,
                    double epsilon) {
  if (has_fused_norm(x_ND, weight_D)) return rms_norm(x_ND, weight_D, epsilon).y_ND;
  Tensor normed_ND = at::empty_like(x_ND);
  at::mul_out(normed_ND, x_ND * inverse_N1, weight_D);
  return normed_ND;
}

// With u = x * inverse: dweight = sum_N(dy * u), dx = inverse * (dy * w) - x * inverse^2 *
// mean_D(dy * u * w). An operation on a device reads and writes whole tensors, so there are few
// operations, on small tensors if possible.
NormGradient norm_gradient(const Tensor& gradient_ND, const Tensor& x_ND, const Tensor& inverse_N1,
                           const Tensor& weight_D, InputGradient wanted,
                           const Tensor& residual_ND) {
  if (has_fused_norm_gradient(gradient_ND, x_ND, weight_D)) {
    return fused_norm_gradient(gradient_ND, x_ND, inverse_N1, weight_D, wanted, residual_ND);
  }
  const Tensor product_ND = (x_ND * inverse_N1).mul_(gradient_ND);
  NormGradient gradient{.x_ND = {}, .weight_D = product_ND.sum(0)};
  if (wanted == InputGradient::kNotWanted) return gradient;
  const Tensor wide_D = wide(weight_D);
  const Tensor sum_N = at::mv(product_ND, wide_D);
  const Tensor factor_N1 = inverse_N1.square().mul_(sum_N.unsqueeze(1)).div_(-x_ND.size(-1));
  Tensor first_ND = gradient_ND * wide_D;
  if (residual_ND.defined()) {
    first_ND = at::addcmul(residual_ND, first_ND, inverse_N1);
  } else {
    first_ND.mul_(inverse_N1);
  }
  gradient.x_ND = at::empty_like(x_ND);
  at::addcmul_out(gradient.x_ND, first_ND, x_ND, factor_N1);
  return gradient;
}

Tensor swiglu(const Tensor& gate_NF, const Tensor& up_NF) { return at::silu(gate_NF).mul_(up_NF); }

void swiglu_gradient(Tensor& gate_NF, Tensor& up_NF, Tensor& product_NF) {
  const Tensor slope_NF = product_NF;
  const Tensor silu_NF = at::silu(gate_NF);
  product_NF = silu_NF * up_NF;
  gate_NF = at::silu_backward(slope_NF * up_NF, gate_NF);
  up_NF = silu_NF * slope_NF;
}

Tensor softmax(Tensor& scores_NV) {
  Tensor log_sum_N = at::logsumexp(scores_NV, {1});
  scores_NV.sub_(log_sum_N.unsqueeze(1)).exp_();
  return log_sum_N;
}

Tensor cross_entropy(Tensor& scores_NV, const Tensor& targets_N, std::int64_t tokens) {
  Tensor log_NV = at::log_softmax(scores_NV, -1, accumulation_type(scores_NV.scalar_type()));
  const Tensor log_N1 = log_NV.gather(1, targets_N.unsqueeze(1));
  Tensor loss = tokens > 0 ? log_N1.sum(at::kDouble).div_(tokens) : log_N1.mean(at::kDouble);
  loss.neg_();
  scores_NV = log_NV.exp_().to(scores_NV.scalar_type());
  return loss.to(accumulation_type(scores_NV.scalar_type()));
}

void cross_entropy_gradient(Tensor& probabilities_NV, const Tensor& targets_N, double gradient,
                            std::int64_t tokens) {
  const Tensor targets_N1 = targets_N.unsqueeze(1);
  probabilities_NV.scatter_add_(1, targets_N1,
                                at::full(targets_N1.sizes(), -1.0, probabilities_NV.options()));
  probabilities_NV.mul_(gradient / static_cast<double>(tokens > 0 ? tokens : targets_N.numel()));
}

void apply_rope(Tensor& x_BTHK, const Tensor& cosine, const Tensor& sine, Rope direction) {
  const std::int64_t half = x_BTHK.size(3) / 2;
  Tensor low = x_BTHK.narrow(3, 0, half);
  Tensor high = x_BTHK.narrow(3, half, half);
  // [T, 1, K / 2]: all heads of a token have the same angles.
  const Tensor c = cosine.unsqueeze(1);
  const Tensor s = direction == Rope::kForward ? sine.unsqueeze(1) : sine.neg().unsqueeze(1);
  const Tensor low_c = low * c;
  const Tensor low_s = low * s;
  at::addcmul_out(low, low_c, high, s, /*value=*/-1);
  at::addcmul_out(high, low_s, high, c);
}

Attention causal_attention(const Tensor& q_BTHK, const Tensor& k_BTHK, const Tensor& v_BTHK) {
  const Tensor q = q_BTHK.transpose(1, 2);
  const Tensor k = k_BTHK.transpose(1, 2);
  const Tensor v = v_BTHK.transpose(1, 2);
  const Fused fused = fused_attention(q, k, v);
  if (fused == Fused::kFlash) {
    const auto result =
        at::_scaled_dot_product_flash_attention(q, k, v, /*dropout_p=*/0.0, /*is_causal=*/true);
    return {.out_BTHK = std::get<0>(result).transpose(1, 2),
            .log_sum_exp = std::get<1>(result),
            .draws = {std::get<6>(result), std::get<7>(result)}};
  }
  if (fused == Fused::kEfficient) {
    const auto [out, log_sum_exp, seed, offset] = at::_scaled_dot_product_efficient_attention(
        q, k, v, /*attn_bias=*/{}, /*compute_log_sumexp=*/true, /*dropout_p=*/0.0,
        /*is_causal=*/true);
    return {.out_BTHK = out.transpose(1, 2), .log_sum_exp = log_sum_exp, .draws = {seed, offset}};
  }
  if (fused == Fused::kCudnn) {
    const auto result = at::_scaled_dot_product_cudnn_attention(
        q, k, v, /*attn_bias=*/{}, /*compute_log_sumexp=*/true, /*dropout_p=*/0.0,
        /*is_causal=*/true);
    return {.out_BTHK = std::get<0>(result).transpose(1, 2),
            .log_sum_exp = std::get<1>(result),
            .draws = {std::get<6>(result), std::get<7>(result)}};
  }
  const Tensor scores_BHTT = scores_of(q, k);
  const Tensor log_sum_exp = at::logsumexp(scores_BHTT, -1);
  const Tensor probabilities_BHTT = (scores_BHTT - log_sum_exp.unsqueeze(-1)).exp_();
  const Tensor out = at::matmul(probabilities_BHTT, wide(v)).to(q.scalar_type());
  return {.out_BTHK = out.transpose(1, 2).contiguous(), .log_sum_exp = log_sum_exp, .draws = {}};
}

AttentionGradient causal_attention_gradient(const Tensor& gradient_BTHK, const Tensor& q_BTHK,
                                            const Tensor& k_BTHK, const Tensor& v_BTHK,
                                            const Attention& attention) {
  const Tensor dy = gradient_BTHK.transpose(1, 2);
  const Tensor q = q_BTHK.transpose(1, 2);
  const Tensor k = k_BTHK.transpose(1, 2);
  const Tensor v = v_BTHK.transpose(1, 2);
  const Tensor out = attention.out_BTHK.transpose(1, 2);
  const auto as_given = [](const Tensor& x_BHTK) { return x_BHTK.transpose(1, 2).contiguous(); };
  // This is the choice of the forward pass, because it depends only on type, shape and device.
  const Fused fused = fused_attention(q, k, v);
  if (fused == Fused::kFlash) {
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_backward(
        dy, q, k, v, out, attention.log_sum_exp, /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, q.size(2),
        k.size(2), /*dropout_p=*/0.0, /*is_causal=*/true, attention.draws[0], attention.draws[1]);
    return {as_given(dq), as_given(dk), as_given(dv)};
  }
  if (fused == Fused::kEfficient) {
    const auto result = at::_scaled_dot_product_efficient_attention_backward(
        dy, q, k, v, /*attn_bias=*/{}, out, attention.log_sum_exp, attention.draws[0],
        attention.draws[1], /*dropout_p=*/0.0,
        /*grad_input_mask=*/std::array<bool, 4>{true, true, true, false}, /*is_causal=*/true);
    return {as_given(std::get<0>(result)), as_given(std::get<1>(result)),
            as_given(std::get<2>(result))};
  }
  if (fused == Fused::kCudnn) {
    const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
        dy, q, k, v, out, attention.log_sum_exp, attention.draws[0], attention.draws[1],
        /*attn_bias=*/{}, /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, q.size(2), k.size(2),
        /*dropout_p=*/0.0, /*is_causal=*/true);
    return {as_given(dq), as_given(dk), as_given(dv)};
  }
  // With p = softmax(s): dv = p^T dy, dp = dy v^T, ds = p (dp - sum_T(p dp)), and sum_T(p dp) is
  // that of dy out over the head (Dao et al., "FlashAttention", 2022, appendix B.2).
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  const Tensor slope = wide(dy);
  const Tensor p = (scores_of(q, k) - attention.log_sum_exp.unsqueeze(-1)).exp_();
  const Tensor row_BHT1 = (slope * wide(out)).sum(-1, /*keepdim=*/true);
  const Tensor ds = at::matmul(slope, wide(v).transpose(2, 3)).sub_(row_BHT1).mul_(p).mul_(scale);
  const auto rounded = [&](const Tensor& x) { return as_given(x.to(q.scalar_type())); };
  return {rounded(at::matmul(ds, wide(k))), rounded(at::matmul(ds.transpose(2, 3), wide(q))),
          rounded(at::matmul(p.transpose(2, 3), slope))};
}

void add_product(Tensor& sum_MN, const Tensor& a_KM, const Tensor& b_KN) {
  if (has_kernel("aten::addmm", sum_MN, "dtype_out")) {
    at::addmm_out(sum_MN, sum_MN, a_KM.t(), b_KN, sum_MN.scalar_type());
  } else {
    sum_MN.add_(at::mm(a_KM.t(), b_KN));
  }
}

// Sorts negated scores in ascending order, in which NaN is last if its sign bit is 0.
Tensor select_top(const Tensor& scores_BT, std::int64_t count) {
  const Tensor keys_BT =
      scores_BT.neg().masked_fill_(scores_BT.isnan(), std::numeric_limits<double>::quiet_NaN());
  const Tensor order_BT =
      std::get<1>(at::sort(keys_BT, /*stable=*/true, /*dim=*/1, /*descending=*/false));
  return std::get<0>(at::sort(order_BT.narrow(1, 0, count), /*dim=*/1));
}

void add_rows(Tensor& gradient_VD, const Tensor& tokens, const Tensor& from) {
  gradient_VD.index_add_(0, tokens.reshape({-1}),
                         from.reshape({-1, from.size(-1)}).to(gradient_VD.scalar_type()));
}

Tensor keep_mask(const Tensor& like, std::uint64_t key, std::uint32_t threshold) {
  const std::int64_t count = like.numel();
  const std::int64_t blocks = (count + 3) / 4;
  const auto words = like.options().dtype(at::kLong);
  const Tensor block = at::arange(blocks, words);
  Tensor c0 = block.bitwise_and(kWord);
  Tensor c1 = block.bitwise_right_shift(32);
  Tensor c2 = at::zeros({blocks}, words);
  Tensor c3 = c2;
  auto key0 = static_cast<std::int64_t>(key & kWord);
  auto key1 = static_cast<std::int64_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const auto [high0, low0] = product_of(c0, 0xD2511F53);
    const auto [high1, low1] = product_of(c2, 0xCD9E8D57);
    c0 = high1.bitwise_xor_(c1).bitwise_xor_(key0);
    c1 = low1;
    c2 = high0.bitwise_xor_(c3).bitwise_xor_(key1);
    c3 = low0;
    key0 = (key0 + 0x9E3779B9) & kWord;
    key1 = (key1 + 0xBB67AE85) & kWord;
  }
  const Tensor all = at::stack({c0, c1, c2, c3}, 1).flatten();
  return all.narrow(0, 0, count).ge(static_cast<std::int64_t>(threshold)).view(like.sizes());
}

double sum_of_squares(const Tensor& tensor) {
  const auto norm =
      at::linalg_vector_norm(tensor, 2, /*dim=*/{}, /*keepdim=*/false, at::kDouble).item<double>();
  return norm * norm;
}

}  // namespace dynmo::kernels::generic
