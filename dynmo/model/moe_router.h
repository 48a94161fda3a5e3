// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which experts of a mixture each token goes to, and with which weight, as a function of one
// micro-batch's router scores: no layout of a run changes it. Whatever ties is decided by a total
// order: the higher score, then the lower index; NaN is the lowest score.
//
// Dimensions: N tokens, E experts, K slots of a token, A assignments that are kept.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "dynmo/model/layer.h"

namespace dynmo::model {

// z: the scores, p = softmax(z). In all but kExpertChoice a token has the `top_k` experts that rank
// highest by
enum class MoeRouter {
  kTopK,          // z (Shazeer et al., 2017), with an auxiliary loss (Fedus et al., 2021)
  kBias,          // p + a bias that evens out the counts (Wang et al., "Auxiliary-loss-free load
                  // balancing", 2024)
  kSinkhorn,      // p after 8 rounds of Sinkhorn's balancing of rows and columns, in training alone
  kBalanced,      // the sum of all z with equally many tokens an expert (balanced_assignment.h), in
                  // training alone
  kExpertChoice,  // experts take the tokens of highest p (Zhou et al., 2022): looks at later tokens
};
// Which assignments an expert drops that has more than its capacity.
enum class MoeDrop { kPosition, kProbability };  // the last tokens', those of the smallest gates

struct RouterOptions {
  MoeRouter router = MoeRouter::kTopK;
  std::int64_t experts = 8;
  std::int64_t top_k = 2;
  // An expert takes ceil(capacity_factor K N / E) tokens of a micro-batch, in training alone; 0:
  // all. kExpertChoice always has one, with 0 as 1.
  double capacity_factor = 0;
  MoeDrop drop = MoeDrop::kPosition;
  double aux_loss = 0;  // alpha, of kTopK
  double z_loss = 0;
};

struct Routing {
  at::Tensor probabilities_NE;  // p, of the scores' type
  at::Tensor log_sum_exp_N;     // of z
  at::Tensor experts_NK;        // int32; of kExpertChoice K is E, and slot e expert e
  at::Tensor gates_NK;          // p over its sum over the slots; p itself if K is 1 or E
  at::Tensor places_NK;         // int32: 0 to A - 1 in the order of experts, then tokens; -1: none
  at::Tensor tokens_A;          // int32, by place
  std::vector<std::int64_t> offsets;   // E + 1, of the places of an expert
  std::vector<std::int64_t> assigned;  // E: before drops
  double entropy = 0;                  // of p, summed over the tokens, in nats
  // alpha E sum_e f_e mean_N(p_e), f_e the share of assignments of expert e before drops: alpha
  // where all are equal.
  double aux_loss = 0;
  double z_loss = 0;  // factor x mean_N(log_sum_exp^2)

  [[nodiscard]] std::int64_t dropped() const;
};

// scores: fp32 or fp64, on the CPU. `bias_E` is looked at by kBias alone.
[[nodiscard]] Routing route(const RouterOptions& options, const at::Tensor& scores_NE,
                            const at::Tensor& bias_E, Pass pass);

// The gradient of the scores: through the gates, and of both losses times `loss_weight` (f_e counts
// as constant). gates: what the gradient of a gate is at its slot; 0 where nothing was kept.
[[nodiscard]] at::Tensor routing_gradient(const RouterOptions& options, const Routing& routing,
                                          const at::Tensor& gates_gradient_NK, double loss_weight);

// diag(u) exp(z) diag(v) after 8 rounds, each first rows to 1 / N, then columns to 1 / E. Row by
// row, in fp64.
[[nodiscard]] std::vector<double> sinkhorn(std::span<const double> scores, std::int64_t experts);

// Figures of a layer of experts, then one for each expert: its assignments before drops.
enum MoeFigure {
  kMoeMicroBatches,  // that have tokens here
  kMoeTokens,
  kMoeDropped,
  kMoeEntropy,
  kMoeAuxLoss,
  kMoeZLoss,
  kMoeCounts
};
[[nodiscard]] std::vector<std::string> moe_figures(std::int64_t experts);
[[nodiscard]] std::vector<double> moe_figures_of(const Routing& routing);

}  // namespace dynmo::model
