// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gradual global magnitude pruning as a load model. At every pruning step the smallest weights of
// all matrices together are removed. So layers with small weights lose most, and stages become
// unequal.
//
// Schedule: Zhu & Gupta, "To prune, or not to prune" (2017), equation 1. Weights are modelled as
// normal, with a std for each matrix. One threshold leaves the wanted share of all weights. It
// determines the density of each matrix.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"
#include "dynmo/dynamism/pruning/options.h"

namespace dynmo::dynamism {

// Returns the share of removed weights at `step`. It is 0 before start. Later it is s_f + (s_i -
// s_f)(1 - p)^3, where p is the progress from start to end at the last pruning step. Requires valid
// parameters.
[[nodiscard]] double sparsity_at(const PruningOptions& options, std::int64_t step);

struct WeightGroup {
  double weights = 0;  // number of weights
  double std = 1;      // of their normal distribution
};

// Returns the density of each group if one threshold on |w| leaves 1 - `sparsity` of all weights.
// No group falls below `min_density`. Exact to rounding, by bisection. Requires stds above 0, 1 -
// sparsity >= min_density.
[[nodiscard]] std::vector<double> global_densities(std::span<const WeightGroup> groups,
                                                   double sparsity, double min_density);

// Returns the share of the units that each group keeps if one threshold on their sizes leaves 1 -
// `sparsity` of all. Sizes are normal, with the group's std as their mean and `spread` times it as
// their std. No group falls below `min_density`; a sparsity that would take more is lowered.
[[nodiscard]] std::vector<double> unit_densities(std::span<const WeightGroup> groups,
                                                 double sparsity, double min_density,
                                                 double spread);

// Makes the load model. Prunes QKV, attention output and the MLP's (experts') matrices of every
// block. Embedding, head, norms, biases and routers stay. A sparse matrix has weights and indices,
// gradients and optimizer state of the kept weights. If units are removed, the layer becomes a
// smaller dense one, whose work is that of its shape. Returns kBadInput with the field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_pruning(const PruningOptions& options,
                                                                const LoadInputs& inputs);

}  // namespace dynmo::dynamism
