// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gradual global magnitude pruning as a load model: at every pruning step the smallest weights of
// all matrices together go, so layers with small weights lose most, and stages get unequal.
//
// Schedule: Zhu & Gupta, "To prune, or not to prune" (2017), equation 1. Weights are taken as
// normal with a std of each matrix's own; the one threshold that leaves the wanted share of
// all weights follows from those, and with it the density of each matrix.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/pruning/options.h"

namespace dynmo::dynamism {

// Share of the weights gone at `step`: 0 before start, s_f + (s_i - s_f)(1 - share)^3 at the last
// pruning step before. Requires valid parameters.
[[nodiscard]] double sparsity_at(const PruningOptions& options, std::int64_t step);

struct WeightGroup {
  double weights = 0;  // how many
  double std = 1;      // of their normal distribution
};

// Density of each group where one threshold on |w| leaves 1 - `sparsity` of all weights, no group
// below `min_density`. Exact to rounding, by bisection. Requires stds above 0,
// 1 - sparsity >= min_density.
[[nodiscard]] std::vector<double> global_densities(std::span<const WeightGroup> groups,
                                                   double sparsity, double min_density);

// Prunes QKV, attention output and the MLP's (experts') matrices of every block; not embedding,
// head, norms, biases or routers. A sparse matrix holds weights and indices, gradients and
// optimizer state of what is left. kBadInput naming the field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_pruning(const PruningOptions& options,
                                                                const LoadInputs& inputs);

}  // namespace dynmo::dynamism
