// SPDX-License-Identifier: Apache-2.0
// Norms of rows, and products of bf16 that are added in fp32. They refuse what CUDA's kernels of
// libtorch 2.11 and 2.15 refuse (RmsNormKernelImpl, _addmm_dtype_out_cuda).
#include <ATen/ATen.h>
#include <torch/library.h>

#include <utility>

#include "call_impl.h"

namespace dynmo::strict {
namespace {

using at::Tensor;

at::ScalarType wide_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// Rows and weight, contiguous, as both operators have them. The kernels read all by the type of the
// rows.
struct Rows {
  Tensor x, weight;

  explicit Rows(const Arguments& call)
      : x(call.tensor("input").contiguous()), weight(call.tensor("weight")) {
    const std::vector<std::int64_t> shape = call["normalized_shape"].toIntVector();
    TORCH_CHECK(x.dim() == 2 && shape.size() == 1 && shape[0] == x.size(1),
                "strict device: ", call.name(), " of shape ", x.sizes(), " over ", shape);
    TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble ||
                    x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kHalf,
                "strict device: ", call.name(), " of ", x.scalar_type());
    TORCH_CHECK(weight.defined() && weight.sizes().equals(shape), "strict device: ", call.name(),
                " with a weight for each column");
    check_type(weight, x.scalar_type());
    weight = weight.contiguous();
  }
  static void check_type(const Tensor& y, at::ScalarType type) {
    TORCH_CHECK(y.scalar_type() == type, "expected scalar type ", type, " but found ",
                y.scalar_type());
  }
  [[nodiscard]] at::TensorOptions wide() const {
    return x.options().dtype(wide_type(x.scalar_type()));
  }
};

void fused_rms_norm(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                    torch::jit::Stack* stack) {
  const Arguments call(op, *stack);
  const Rows rows(call);
  TORCH_CHECK(!call["eps"].isNone(), "strict device: ", call.name(), " without an epsilon");
  const Tensor y = at::empty(rows.x.sizes(), rows.x.options());
  const Tensor rstd = at::empty({rows.x.size(0), 1}, rows.wide());
  launch(call.name(), {rows.x, rows.weight}, {y, rstd},
         [x = opened(rows.x), weight = opened(rows.weight), to = opened(y), inverse = opened(rstd),
          epsilon = call["eps"].toDouble()] {
           const Tensor wide = x.to(inverse.scalar_type());
           inverse.copy_(wide.square().mean(-1, /*keepdim=*/true).add_(epsilon).rsqrt_());
           to.copy_(wide * inverse * weight.to(inverse.scalar_type()));
         });
  torch::jit::push(*stack, y, rstd);
}

void fused_rms_norm_backward(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                             torch::jit::Stack* stack) {
  const Arguments call(op, *stack);
  const Rows rows(call);
  const Tensor slope = call.tensor("grad_out").contiguous();
  const Tensor rstd = call.tensor("rstd");
  const std::vector<bool> mask = call["output_mask"].toBoolList().vec();
  Rows::check_type(slope, rows.x.scalar_type());
  Rows::check_type(rstd, wide_type(rows.x.scalar_type()));
  TORCH_CHECK(
      slope.sizes() == rows.x.sizes() && rstd.numel() == rows.x.size(0) && rstd.is_contiguous(),
      "strict device: ", call.name(), " of shapes ", slope.sizes(), ", ", rstd.sizes());
  const Tensor of_x = mask[0] ? at::empty(rows.x.sizes(), rows.x.options()) : Tensor();
  const Tensor of_weight = mask[1] ? at::empty(rows.weight.sizes(), rows.x.options()) : Tensor();
  std::vector<Tensor> written;
  for (const Tensor& made : {of_x, of_weight}) {
    if (made.defined()) written.push_back(made);
  }
  launch(
      call.name(), {slope, rows.x, rstd, rows.weight}, written,
      [dy = opened(slope), x = opened(rows.x), inverse = opened(rstd), weight = opened(rows.weight),
       dx = mask[0] ? opened(of_x) : Tensor(), dw = mask[1] ? opened(of_weight) : Tensor()] {
        const at::ScalarType wide = inverse.scalar_type();
        const Tensor rstd_N1 = inverse.view({-1, 1});
        const Tensor unit = x.to(wide) * rstd_N1;
        if (dw.defined()) dw.copy_((dy.to(wide) * unit).sum(0));
        if (!dx.defined()) return;
        const Tensor turned = dy.to(wide) * weight.to(wide);
        dx.copy_(rstd_N1 * (turned - unit * (turned * unit).mean(-1, /*keepdim=*/true)));
      });
  torch::jit::push(*stack, of_x, of_weight);
}

void addmm_dtype_out(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                     torch::jit::Stack* stack) {
  const Arguments call(op, *stack);
  const Tensor self = call.tensor("self");
  const Tensor a = call.tensor("mat1");
  const Tensor b = call.tensor("mat2");
  const Tensor out = call.tensor("out");
  const auto type = static_cast<at::ScalarType>(call["out_dtype"].toInt());
  const at::ScalarType given = a.scalar_type();
  TORCH_CHECK(a.dim() == 2, "mat1 must be a matrix, got ", a.dim(), "-D tensor");
  TORCH_CHECK(b.dim() == 2, "mat2 must be a matrix, got ", b.dim(), "-D tensor");
  TORCH_CHECK(a.size(1) == b.size(0), "mat1 and mat2 shapes cannot be multiplied (", a.sizes(),
              " and ", b.sizes(), ")");
  TORCH_CHECK(given == b.scalar_type(), "mat1 and mat2 must have the same dtype, but got ", given,
              " and ", b.scalar_type());
  TORCH_CHECK(
      type == given || (type == at::kFloat && (given == at::kHalf || given == at::kBFloat16)),
      "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  TORCH_CHECK(type == out.scalar_type(),
              "out_dtype must be the same as the dtype of the provided out tensor");
  TORCH_CHECK(type == self.scalar_type() || self.scalar_type() == given,
              "self dtype must match either out_dtype or mat1 dtype");
  const std::vector<std::int64_t> shape = {a.size(0), b.size(1)};
  TORCH_CHECK(self.sizes().equals(shape) && out.sizes().equals(shape),
              "strict device: ", call.name(), " to a matrix of shape ", out.sizes());
  launch(call.name(), {self, a, b}, {out},
         [from = opened(self), x = opened(a), y = opened(b), to = opened(out),
          beta = call["beta"].toScalar(), alpha = call["alpha"].toScalar()] {
           const at::ScalarType wide = wide_type(to.scalar_type());
           to.copy_(at::addmm(from.to(wide), x.to(wide), y.to(wide), beta, alpha));
         });
  torch::jit::push(*stack, out);
}

}  // namespace

void register_norms_and_products(torch::Library& library) {
  using torch::CppFunction;
  library.impl("_fused_rms_norm", CppFunction::makeFromBoxedFunction<&fused_rms_norm>());
  library.impl("_fused_rms_norm_backward",
               CppFunction::makeFromBoxedFunction<&fused_rms_norm_backward>());
  library.impl("addmm.dtype_out", CppFunction::makeFromBoxedFunction<&addmm_dtype_out>());
}

}  // namespace dynmo::strict
