// SPDX-License-Identifier: Apache-2.0
// Causal attention of whole sequences: flash, efficient and cuDNN's, and the choice between them.
// The CPU computes them by the formula. A gradient uses what the forward operator has saved, and
// refuses a call that lacks a part of it.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "call_impl.h"

namespace dynmo::strict {
namespace {

using at::Tensor;

enum class Kind { kFlash, kEfficient, kCudnn };

bool is_half(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

// Chooses as CUDA does for a device of capability 9 and a cuDNN of 9.15 or newer, for heads that
// the library asks about.
void sdp_choice(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                torch::jit::Stack* stack) {
  constexpr std::int64_t kFormula = 0;
  constexpr std::int64_t kFlash = 1;
  constexpr std::int64_t kEfficient = 2;
  constexpr std::int64_t kCudnn = 3;
  const Arguments call(op, *stack);
  const at::ScalarType type = call.tensor("query").scalar_type();
  const at::Context& context = at::globalContext();
  std::int64_t choice = type == at::kFloat ? kEfficient : kFormula;
  if (is_half(type)) {
    const bool may = context.userEnabledCuDNNSDP() && !context.deterministicAlgorithms();
    choice = may ? kCudnn : kFlash;
  }
  torch::jit::push(*stack, choice);
}

// The arguments that all of the operators have: [B, H, T, K].
struct Whole {
  Tensor q, k, v;

  Whole(const Arguments& call, Kind kind)
      : q(call.tensor("query")), k(call.tensor("key")), v(call.tensor("value")) {
    const at::ScalarType type = q.scalar_type();
    TORCH_CHECK(is_half(type) || (kind == Kind::kEfficient && type == at::kFloat),
                "strict device: ", call.name(), " of ", type);
    const std::int64_t most = kind == Kind::kEfficient ? 1024 : (kind == Kind::kFlash ? 256 : 128);
    TORCH_CHECK(q.dim() == 4 && q.size(3) % 8 == 0 && q.size(3) <= most,
                "strict device: ", call.name(), " of shape ", q.sizes());
    for (const Tensor* x : {&q, &k, &v}) {
      TORCH_CHECK(x->scalar_type() == type && x->sizes() == q.sizes() && x->stride(3) == 1,
                  "strict device: ", call.name(), " of equal shapes and types");
    }
    // cuDNN's kernel reads by the strides of these, too, in units of 16 bytes.
    TORCH_CHECK(kind != Kind::kCudnn || q.stride(2) % 8 == 0, "strict device: ", call.name(),
                " of strides ", q.strides());
    TORCH_CHECK(
        call["is_causal"].toBool() && call["dropout_p"].toDouble() == 0 && call["scale"].isNone(),
        "strict device: ", call.name(), " only causal, without dropout");
    TORCH_CHECK(kind != Kind::kCudnn || !at::globalContext().deterministicAlgorithms(),
                "strict device: ", call.name(), " where equal bits are demanded");
  }

  // Returns an uninitialised tensor with the strides of `x`, as CUDA's kernels make them.
  static Tensor like(const Tensor& x) {
    return at::empty(x.transpose(1, 2).sizes(), x.options()).transpose(1, 2);
  }
};

// The state that the forward operator leaves for its gradient.
struct Left {
  Tensor log_sums;  // cuDNN: [B, H, T, 1]; efficient: T rounded up to 32
  Tensor seed, offset;

  static Left empty(const Tensor& q, Kind kind) {
    const auto wide = q.options().dtype(at::kFloat);
    const auto whole = q.options().dtype(at::kLong);
    const std::int64_t T = q.size(2);
    switch (kind) {
      case Kind::kFlash:
        return {at::empty({q.size(0), q.size(1), T}, wide), at::empty({2}, whole),
                at::empty({}, whole)};
      case Kind::kEfficient:
        return {at::empty({q.size(0), q.size(1), (T + 31) / 32 * 32}, wide), at::empty({}, whole),
                at::empty({}, whole)};
      case Kind::kCudnn:
        break;
    }
    return {at::empty({q.size(0), q.size(1), T, 1}, wide), at::empty({}, whole),
            at::empty({}, whole)};
  }

  // Refuses what the forward operator of this kind does not leave.
  Left(const Arguments& call, const Tensor& q, Kind kind)
      : log_sums(call.tensor("logsumexp")),
        seed(call.tensor("philox_seed")),
        offset(call.tensor("philox_offset")) {
    const Left wanted = empty(q, kind);
    const auto same = [](const Tensor& x, const Tensor& y) {
      return x.defined() && x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes();
    };
    TORCH_CHECK(
        same(log_sums, wanted.log_sums) && same(seed, wanted.seed) && same(offset, wanted.offset),
        "strict device: ", call.name(), " wants what its forward operator has left");
  }

  // Returns the logarithms of opened memory by query, [B, H, T, 1].
  static Tensor by_query(const Tensor& log_sums, std::int64_t T) {
    return log_sums.dim() == 4 ? log_sums : log_sums.narrow(2, 0, T).unsqueeze(3);
  }

 private:
  Left(Tensor log, Tensor first, Tensor second)
      : log_sums(std::move(log)), seed(std::move(first)), offset(std::move(second)) {}
};

Tensor scores_of(const Tensor& q, const Tensor& k) {
  const std::int64_t T = q.size(2);
  return at::matmul(q, k.transpose(2, 3))
      .div_(std::sqrt(static_cast<double>(q.size(3))))
      .masked_fill_(at::ones({T, T}, at::kBool).triu_(1), -std::numeric_limits<float>::infinity());
}

template <Kind kind>
void whole_forward(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                   torch::jit::Stack* stack) {
  const Arguments call(op, *stack);
  const Whole x(call, kind);
  if constexpr (kind != Kind::kFlash) {
    TORCH_CHECK(call["compute_log_sumexp"].toBool(), "strict device: ", call.name(),
                " without what its gradient needs");
  }
  const Tensor out = Whole::like(x.q);
  const Left left = Left::empty(x.q, kind);
  launch(call.name(), {x.q, x.k, x.v}, {out, left.log_sums, left.seed, left.offset},
         [q = opened(x.q), k = opened(x.k), v = opened(x.v), to = opened(out),
          logs = opened(left.log_sums), seed = opened(left.seed), offset = opened(left.offset)] {
           const Tensor scores = scores_of(q.to(at::kFloat), k.to(at::kFloat));
           const Tensor log_sum = at::logsumexp(scores, {3}, /*keepdim=*/true);
           Left::by_query(logs, q.size(2)).copy_(log_sum);
           to.copy_(at::matmul((scores - log_sum).exp_(), v.to(at::kFloat)));
           seed.zero_();
           offset.zero_();
         });
  const std::int64_t T = x.q.size(2);
  if constexpr (kind == Kind::kEfficient) {
    torch::jit::push(*stack, out, left.log_sums, left.seed, left.offset);
  } else {
    torch::jit::push(*stack, out, left.log_sums, Tensor(), Tensor(), T, T, left.seed, left.offset,
                     Tensor());
  }
}

template <Kind kind>
void whole_backward(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                    torch::jit::Stack* stack) {
  const Arguments call(op, *stack);
  const Whole x(call, kind);
  const Left left(call, x.q, kind);
  const Tensor slope = call.tensor(kind == Kind::kEfficient ? "grad_out_" : "grad_out");
  const Tensor out = call.tensor("out");
  if constexpr (kind != Kind::kEfficient) {
    TORCH_CHECK(call["max_q"].toInt() == x.q.size(2) && call["max_k"].toInt() == x.k.size(2),
                "strict device: ", call.name(), " of other lengths than its sequences");
  }
  for (const Tensor* y : {&slope, &out}) {
    TORCH_CHECK(y->scalar_type() == x.q.scalar_type() && y->sizes() == x.q.sizes(),
                "strict device: ", call.name(), " of equal shapes and types");
  }
  const std::array made = {Whole::like(x.q), Whole::like(x.k), Whole::like(x.v)};
  launch(call.name(), {x.q, x.k, x.v, slope, out, left.log_sums, left.seed, left.offset},
         {made[0], made[1], made[2]},
         [given = std::array{opened(x.q), opened(x.k), opened(slope)}, v = opened(x.v),
          y = opened(out), logs = opened(left.log_sums), dq = opened(made[0]), dk = opened(made[1]),
          dv = opened(made[2])] {
           const Tensor q = given[0].to(at::kFloat);
           const Tensor k = given[1].to(at::kFloat);
           const Tensor dy = given[2].to(at::kFloat);
           const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
           const Tensor p = (scores_of(q, k) - Left::by_query(logs, q.size(2))).exp_();
           const Tensor row = (dy * y.to(at::kFloat)).sum(-1, /*keepdim=*/true);
           const Tensor ds =
               at::matmul(dy, v.to(at::kFloat).transpose(2, 3)).sub_(row).mul_(p).mul_(scale);
           dq.copy_(at::matmul(ds, k));
           dk.copy_(at::matmul(ds.transpose(2, 3), q));
           dv.copy_(at::matmul(p.transpose(2, 3), dy));
         });
  torch::jit::push(*stack, made[0], made[1], made[2]);
  if constexpr (kind == Kind::kEfficient) torch::jit::push(*stack, Tensor());
}

}  // namespace

void register_attention(torch::Library& library) {
  using torch::CppFunction;
  library.impl("_fused_sdp_choice", CppFunction::makeFromBoxedFunction<&sdp_choice>());
  library.impl("_scaled_dot_product_flash_attention",
               CppFunction::makeFromBoxedFunction<&whole_forward<Kind::kFlash>>());
  library.impl("_scaled_dot_product_flash_attention_backward",
               CppFunction::makeFromBoxedFunction<&whole_backward<Kind::kFlash>>());
  library.impl("_scaled_dot_product_efficient_attention",
               CppFunction::makeFromBoxedFunction<&whole_forward<Kind::kEfficient>>());
  library.impl("_scaled_dot_product_efficient_attention_backward",
               CppFunction::makeFromBoxedFunction<&whole_backward<Kind::kEfficient>>());
  library.impl("_scaled_dot_product_cudnn_attention",
               CppFunction::makeFromBoxedFunction<&whole_forward<Kind::kCudnn>>());
  library.impl("_scaled_dot_product_cudnn_attention_backward",
               CppFunction::makeFromBoxedFunction<&whole_backward<Kind::kCudnn>>());
}

}  // namespace dynmo::strict
