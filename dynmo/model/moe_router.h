// SPDX-License-Identifier: Apache-2.0
#pragma once

// Chooses the experts of each token in a mixture and their weights. The result is a function of one
// micro-batch's router scores, so the layout of a run does not change it. A total order decides
// ties: the higher score, then the lower index. NaN is the lowest score.
//
// Dimensions: N tokens, E experts, K slots of a token, A assignments that are kept.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/dynamism/moe/routing.h"
#include "dynmo/model/layer.h"

namespace dynmo::model {

using dynamism::MoeDrop;
using dynamism::MoeRouter;

struct RouterOptions {
  MoeRouter router = MoeRouter::kTopK;
  std::int64_t experts = 8;
  std::int64_t top_k = 2;
  // An expert takes ceil(capacity_factor K N / E) tokens of a micro-batch, in training alone. 0
  // means all. kExpertChoice always has a capacity, and takes 0 as 1.
  double capacity_factor = 0;
  MoeDrop drop = MoeDrop::kPosition;
  double aux_loss = 0;  // alpha of kTopK
  double z_loss = 0;
};

struct Routing {
  at::Tensor probabilities_NE;  // p, of the scores' type
  at::Tensor log_sum_exp_N;     // of z
  at::Tensor experts_NK;        // int32; in kExpertChoice K is E, and slot e expert e
  at::Tensor gates_NK;          // p over its sum over the slots; p itself if K is 1 or E
  at::Tensor places_NK;         // int32: 0 to A - 1 in the order of experts, then tokens; -1: none
  at::Tensor tokens_A;          // int32, by place
  // These are for devices alone, where experts, places and tokens are int64, too. A is an upper
  // limit there, so that the host need not wait: rows from starts[E] on were dropped. `entries` are
  // the slots n K + k by place, int64. `starts` are the E + 1 offsets of the experts' places,
  // int64. `assigned` is before drops, fp64.
  at::Tensor entries_A = {};
  at::Tensor starts = {};
  at::Tensor assigned_E = {};
  at::Tensor later_figures = {};  // those of moe_figures() from kMoeDropped on
  // On the CPU alone.
  std::vector<std::int64_t> offsets = {};   // E + 1 offsets of an expert's places
  std::vector<std::int64_t> assigned = {};  // E, before drops
  // Entropy of p, summed over the tokens. In nats.
  double entropy = 0;
  // alpha E sum_e f_e mean_N(p_e). f_e is the share of assignments of expert e before drops. The
  // result is alpha if all shares are equal.
  double aux_loss = 0;
  double z_loss = 0;  // factor x mean_N(log_sum_exp^2)

  [[nodiscard]] std::int64_t dropped() const;
};

// Routes the tokens. `scores_NE` is fp32 or fp64. Only kBias reads `bias_E`. For scores on a device
// the host waits only with kBalanced in training, which assigns the tokens on the host.
[[nodiscard]] Routing route(const RouterOptions& options, const at::Tensor& scores_NE,
                            const at::Tensor& bias_E, Pass pass);

// Returns the gradient of the scores, through the gates and from both losses times `loss_weight`.
// f_e counts as constant. `gates_gradient_NK` is 0 for slots that were dropped.
[[nodiscard]] at::Tensor routing_gradient(const RouterOptions& options, const Routing& routing,
                                          const at::Tensor& gates_gradient_NK, double loss_weight);

// Returns diag(u) exp(z) diag(v) after 8 rounds, in fp64, row by row. Each round scales the rows to
// 1 / N, then the columns to 1 / E.
[[nodiscard]] std::vector<double> sinkhorn(std::span<const double> scores, std::int64_t experts);

// Figures of a layer of experts. After them come the assignments of each expert before drops.
enum MoeFigure {
  kMoeMicroBatches,  // micro-batches with tokens here
  kMoeTokens,
  kMoeDropped,
  kMoeEntropy,
  kMoeAuxLoss,
  kMoeZLoss,
  kMoeCounts
};
[[nodiscard]] std::vector<std::string> moe_figures(std::int64_t experts);
// Returns the values of moe_figures(). On a device, those of Routing::later_figures are left out.
[[nodiscard]] std::vector<double> moe_figures_of(const Routing& routing);

}  // namespace dynmo::model
