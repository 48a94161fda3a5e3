// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <limits>
#include <tuple>

#include "dynmo/dynamism/early_exit/training/exit_layer.h"
#include "dynmo/dynamism/early_exit/training/exit_scores_impl.h"
#include "dynmo/kernels/operations.h"

namespace dynmo::dynamism {

using at::Tensor;

ScoresOnDevice scores_on_device(const Tensor& scores_MV, const Tensor& targets_M) {
  ScoresOnDevice result;
  const at::ScalarType wide = kernels::accumulation_type(scores_MV.scalar_type());
  result.probabilities_MV = at::softmax(scores_MV, 1, wide);
  const Tensor& p_MV = result.probabilities_MV;
  const Tensor best_M2 = std::get<0>(at::topk(p_MV, 2, /*dim=*/1));
  result.gap_M = best_M2.select(1, 0) - best_M2.select(1, 1);
  result.right_M = at::argmax(p_MV, 1).eq(targets_M);
  const double least = wide == at::kDouble ? std::numeric_limits<double>::min()
                                           : static_cast<double>(std::numeric_limits<float>::min());
  result.loss_M = p_MV.gather(1, targets_M.unsqueeze(1))
                      .squeeze(1)
                      .clamp_min(least)
                      .to(at::kDouble)
                      .log_()
                      .neg_();
  return result;
}

RowsByLeaving divide_by(const Tensor& confidence_N, double threshold) {
  const Tensor leaves_N = confidence_N.ge(threshold).to(at::kInt);
  const Tensor order_N =
      std::get<1>(at::sort(leaves_N, /*stable=*/true, /*dim=*/0, /*descending=*/false));
  const auto left = leaves_N.sum().item<std::int64_t>();
  const std::int64_t stay = confidence_N.numel() - left;
  return {.stay = order_N.narrow(0, 0, stay), .left = order_N.narrow(0, stay, left)};
}

Tensor figures_on_device(const ScoresOnDevice& scores, const Tensor& confidence_N,
                         at::Device device) {
  Tensor figures = at::zeros({kExitFigures - kExitLoss}, at::device(device).dtype(at::kDouble));
  const auto one = [&](int figure) { return figures.select(0, figure - kExitLoss); };
  if (scores.loss_M.defined()) {
    one(kExitLoss).copy_(scores.loss_M.sum());
    one(kExitScored).fill_(scores.loss_M.numel());
    one(kExitRight).copy_(scores.right_M.sum(at::kDouble));
  }
  if (confidence_N.defined()) {
    figures.narrow(0, kExitCounts - kExitLoss, kExitBins).copy_(exit_bin_counts(confidence_N));
  }
  return figures;
}

}  // namespace dynmo::dynamism
