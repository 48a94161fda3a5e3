// SPDX-License-Identifier: Apache-2.0
#include "dynmo/model/head_slice_impl.h"

namespace dynmo::model {

using at::Tensor;

Tensor pack(const SliceNumbers& numbers, std::vector<std::int64_t> tokens,
            at::ScalarType compute_type) {
  const std::int64_t width = numbers.n_ND.size(1);
  Tensor packed = at::empty({numbers.n_ND.size(0), width + 2}, numbers.log_sum_N.options());
  packed.narrow(1, 0, width).copy_(numbers.n_ND);
  packed.select(1, width).copy_(numbers.log_sum_N);
  packed.select(1, width + 1).copy_(numbers.target_N);
  if (compute_type == at::kBFloat16) packed = packed.view(at::kBFloat16);
  tokens.push_back(packed.size(1));
  return packed.view(tokens);
}

SliceNumbers unpack(const Tensor& packed, std::int64_t width) {
  Tensor all = rows(packed);
  if (all.scalar_type() == at::kBFloat16) all = all.view(at::kFloat);
  DYNMO_CHECK(all.size(1) == width + 2, "{} + 2 numbers a token, got {}", width, all.size(1));
  return {.n_ND = all.narrow(1, 0, width),
          .log_sum_N = all.select(1, width),
          .target_N = all.select(1, width + 1)};
}

void SavedSlice::score(const Parameter& matrix, cost::HeadRows rows, const Tensor& n_ND,
                       const Tensor& targets_N) {
  scores_NV = times(matrix, n_ND).to(kernels::accumulation_type(n_ND.scalar_type()));
  here_N = targets_N.ge(rows.begin).logical_and_(targets_N.lt(rows.end));
  column_N = at::where(here_N, targets_N - rows.begin, at::zeros_like(targets_N));
}

SliceNumbers SavedSlice::pass_on(const SliceNumbers& before) {
  const Tensor score_N = scores_NV.gather(1, column_N.unsqueeze(1)).squeeze(1).mul_(here_N);
  const Tensor own = kernels::softmax(scores_NV);
  if (!before.log_sum_N.defined()) {
    own_N = at::ones_like(own);
    return {.n_ND = {}, .log_sum_N = own, .target_N = score_N};
  }
  Tensor log_sum_N = at::logaddexp(before.log_sum_N, own);
  own_N = (own - log_sum_N).exp_();
  before_N = (before.log_sum_N - log_sum_N).exp_();
  return {.n_ND = {}, .log_sum_N = std::move(log_sum_N), .target_N = before.target_N + score_N};
}

void SavedSlice::keep(const Tensor& tokens) {
  for (Tensor* of : {&scores_NV, &own_N, &before_N, &column_N, &here_N}) {
    if (of->defined()) *of = of->index_select(0, tokens);
  }
}

SliceNumbers SavedSlice::gradient(const Parameter& matrix, const SliceNumbers& after) {
  scores_NV.mul_((after.log_sum_N * own_N).unsqueeze(1));
  scores_NV.scatter_add_(1, column_N.unsqueeze(1), (after.target_N * here_N).unsqueeze(1));
  column_N.reset();
  here_N.reset();
  SliceNumbers before{.n_ND = {},
                      .log_sum_N = before_N.defined() ? after.log_sum_N * before_N : Tensor(),
                      .target_N = after.target_N};
  own_N.reset();
  before_N.reset();
  const at::ScalarType sums = scores_NV.scalar_type();
  scores_NV = scores_NV.to(compute_value(matrix).scalar_type());
  if (!after.n_ND.defined()) {
    before.n_ND = times_transposed(matrix, scores_NV).to(sums);
    return before;
  }
  before.n_ND = after.n_ND.clone(at::MemoryFormat::Contiguous);
  if (scores_NV.scalar_type() == sums) {
    add_times_transposed(before.n_ND, matrix, scores_NV);
  } else {
    before.n_ND.add_(times_transposed(matrix, scores_NV));
  }
  return before;
}

void SavedSlice::add_weight_gradient(Parameter& matrix, const Tensor& n_ND) const {
  add_product(matrix, scores_NV, n_ND);
}

SliceLoss loss_of(const SliceNumbers& last, double loss_weight, std::int64_t tokens) {
  const Tensor& sums_N = last.log_sum_N;
  const at::ScalarType type = sums_N.scalar_type();
  const Tensor each_N = sums_N - last.target_N;
  const auto mean_of = static_cast<double>(tokens > 0 ? tokens : sums_N.numel());
  // In the loss's type, as autograd would have it.
  const double weight =
      type == at::kFloat ? static_cast<double>(static_cast<float>(loss_weight)) : loss_weight;
  return {
      .loss = (tokens > 0 ? each_N.sum(at::kDouble) / mean_of : each_N.mean(at::kDouble)).to(type),
      .gradient = {.n_ND = {},
                   .log_sum_N = at::full_like(sums_N, weight / mean_of),
                   .target_N = at::full_like(sums_N, -weight / mean_of)}};
}

}  // namespace dynmo::model
