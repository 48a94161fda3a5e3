// SPDX-License-Identifier: Apache-2.0
#include "dynmo/kernels/fused.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "dynmo/core/check.h"

namespace dynmo::kernels::fused {
namespace {

using device::kThreads;
using device::launch;
using device::Operand;

constexpr std::int64_t kPackBytes = 16;  // read by a thread at a time

bool is_served(const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  const std::int64_t offset =
      tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
  // Allocations of a device start at multiples of 256 bytes, so only the offset matters.
  return tensor.is_contiguous() && offset % kPackBytes == 0;
}

Operand read(const at::Tensor& tensor) { return {.tensor = tensor, .written = false}; }
Operand written(const at::Tensor& tensor) { return {.tensor = tensor, .written = true}; }

const char* of_type(const at::Tensor& x, const char* of_float, const char* of_bf16) {
  return x.scalar_type() == at::kFloat ? of_float : of_bf16;
}

// Returns the blocks for `count` elements, `pack` in each thread. kMost exceeds what a device runs
// at a time.
std::int64_t blocks_for(std::int64_t count, std::int64_t pack) {
  constexpr std::int64_t kMost = 1 << 15;
  return std::clamp((count / pack + kThreads - 1) / kThreads, std::int64_t{1}, kMost);
}
std::int64_t blocks_for(const at::Tensor& x) {
  return blocks_for(x.numel(), kPackBytes / static_cast<std::int64_t>(x.element_size()));
}

void check_row(const at::Tensor& scores_NV, const at::Tensor& targets_N) {
  DYNMO_CHECK(
      scores_NV.dim() == 2 && scores_NV.size(1) > 0 && targets_N.numel() == scores_NV.size(0),
      "scores [N, V] and N targets, got {} dimensions and {}", scores_NV.dim(), targets_N.numel());
}

}  // namespace

bool serves(const at::Tensor& first, std::initializer_list<at::Tensor> others) {
  const bool typed = first.scalar_type() == at::kFloat || first.scalar_type() == at::kBFloat16;
  return typed && is_served(first) && std::ranges::all_of(others, is_served) &&
         device::why_no_kernels(first.device()).empty();
}

at::Tensor swiglu(const at::Tensor& gate_NF, const at::Tensor& up_NF) {
  at::Tensor product_NF = at::empty_like(gate_NF);
  if (gate_NF.numel() == 0) return product_NF;
  launch({.kernel = of_type(gate_NF, "swiglu_float", "swiglu_bf16"),
          .device = gate_NF.device(),
          .blocks = blocks_for(gate_NF),
          .arguments = {read(gate_NF), read(up_NF), written(product_NF), gate_NF.numel()}});
  return product_NF;
}

void swiglu_gradient(at::Tensor& gate_NF, at::Tensor& up_NF, at::Tensor& product_NF) {
  if (gate_NF.numel() == 0) return;
  launch({.kernel = of_type(gate_NF, "swiglu_gradient_float", "swiglu_gradient_bf16"),
          .device = gate_NF.device(),
          .blocks = blocks_for(gate_NF),
          .arguments = {written(gate_NF), written(up_NF), written(product_NF), gate_NF.numel()}});
}

NormGradient norm_gradient(const at::Tensor& gradient_ND, const at::Tensor& x_ND,
                           const at::Tensor& inverse_N1, const at::Tensor& weight_D,
                           InputGradient wanted, const at::Tensor& residual_ND) {
  constexpr std::int64_t kRows = 32;  // in each partial sum of the weight's gradient
  const std::int64_t rows = x_ND.size(0);
  const std::int64_t width = x_ND.size(1);
  const at::Tensor parts =
      at::empty({(rows + kRows - 1) / kRows, width}, x_ND.options().dtype(at::kFloat));
  if (parts.numel() > 0) {
    launch({.kernel = of_type(x_ND, "norm_weight_gradient_float", "norm_weight_gradient_bf16"),
            .device = x_ND.device(),
            .blocks = blocks_for(parts.numel(), 1),
            .arguments = {read(gradient_ND), read(x_ND), read(inverse_N1), written(parts), rows,
                          width}});
  }
  NormGradient gradient{.x_ND = {}, .weight_D = parts.sum(0)};
  if (wanted == InputGradient::kNotWanted) return gradient;
  gradient.x_ND = at::empty_like(x_ND);
  if (x_ND.numel() == 0) return gradient;
  launch({.kernel = of_type(x_ND, "norm_gradient_float", "norm_gradient_bf16"),
          .device = x_ND.device(),
          .blocks = rows,
          .arguments = {read(gradient_ND), read(x_ND), read(inverse_N1), read(weight_D),
                        read(residual_ND), written(gradient.x_ND), static_cast<int>(width)}});
  return gradient;
}

at::Tensor cross_entropy(at::Tensor& scores_NV, const at::Tensor& targets_N, std::int64_t tokens) {
  check_row(scores_NV, targets_N);
  at::Tensor losses_N = at::empty({scores_NV.size(0)}, scores_NV.options().dtype(at::kDouble));
  if (losses_N.numel() > 0) {
    launch({.kernel = of_type(scores_NV, "cross_entropy_float", "cross_entropy_bf16"),
            .device = scores_NV.device(),
            .blocks = scores_NV.size(0),
            .arguments = {written(scores_NV), read(targets_N), written(losses_N),
                          static_cast<int>(scores_NV.size(1))}});
  }
  const std::int64_t divisor = tokens > 0 ? tokens : scores_NV.size(0);
  return losses_N.sum().div_(static_cast<double>(divisor)).to(at::kFloat);
}

void cross_entropy_gradient(at::Tensor& probabilities_NV, const at::Tensor& targets_N,
                            double gradient, std::int64_t tokens) {
  check_row(probabilities_NV, targets_N);
  const std::int64_t rows = probabilities_NV.size(0);
  if (rows == 0) return;
  const double scale = gradient / static_cast<double>(tokens > 0 ? tokens : rows);
  launch({.kernel = of_type(probabilities_NV, "cross_entropy_gradient_float",
                            "cross_entropy_gradient_bf16"),
          .device = probabilities_NV.device(),
          .blocks = rows,
          .arguments = {written(probabilities_NV), read(targets_N),
                        static_cast<int>(probabilities_NV.size(1)), static_cast<float>(scale)}});
}

void apply_rope(at::Tensor& x_BTHK, const at::Tensor& cosine, const at::Tensor& sine,
                Rope direction) {
  if (x_BTHK.numel() == 0) return;
  const float sign = direction == Rope::kForward ? 1.0F : -1.0F;
  launch({.kernel = of_type(x_BTHK, "rotate_float", "rotate_bf16"),
          .device = x_BTHK.device(),
          .blocks = x_BTHK.size(0) * x_BTHK.size(1),
          .arguments = {written(x_BTHK), read(cosine), read(sine), sign, x_BTHK.size(1),
                        static_cast<int>(x_BTHK.size(2)), static_cast<int>(x_BTHK.size(3) / 2)}});
}

at::Tensor keep_mask(const at::Tensor& like, std::uint64_t key, std::uint32_t threshold) {
  at::Tensor kept = at::empty(like.sizes(), like.options().dtype(at::kBool));
  if (kept.numel() == 0) return kept;
  launch({.kernel = "keep_mask",
          .device = like.device(),
          .blocks = blocks_for(kept.numel(), 4),
          .arguments = {written(kept), kept.numel(), key, threshold}});
  return kept;
}

void update(const at::Tensor& value, const at::Tensor& gradient, const at::Tensor& first_moment,
            const at::Tensor& second_moment, const at::Tensor& copy,
            const device::AdamWFactors& factors) {
  if (value.numel() == 0) return;
  launch({.kernel = "adamw",
          .device = value.device(),
          .blocks = blocks_for(value),
          .arguments = {written(value), written(gradient), written(first_moment),
                        written(second_moment), written(copy), value.numel(), factors}});
}

}  // namespace dynmo::kernels::fused
