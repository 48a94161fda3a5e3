// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gradual global magnitude pruning as a load model: at every pruning step the smallest weights of
// all matrices together go, so layers with small weights lose most, and stages get unequal.
//
// Schedule: Zhu & Gupta, "To prune, or not to prune" (2017), equation 1. Weights are taken as
// normal with a deviation of each matrix's own; the one threshold that leaves the wanted share of
// all weights follows from those, and with it the density of each matrix.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/dynamism/load_inputs.h"
#include "dynmo/dynamism/load_model.h"

namespace dynmo::dynamism {

struct PruningParameters {
  // DynMo's example: from step 3000 to 7000 every 1000, to 90 %; the end point is included.
  std::int64_t start = 3000;
  std::int64_t end = 7000;  // a whole number of `every` behind start
  std::int64_t every = 1000;
  double initial_sparsity = 0;
  double final_sparsity = 0.9;
  // Rate of the sparse kernels / rate of the dense ones, so that a matrix of density d takes
  // min(1, d / rate) of its dense time: it stays dense above. 0.4 is what a register-tiled CSR
  // product reached on a CPU (1.9x at 80 %, 3.9x at 90 %); Sputnik on an A100 in fp32 is at 0.18 at
  // 90 %, below every bf16 tensor core.
  double sparse_rate = 0.4;
  // Deviation of the last block's weights / the first's, geometric in between, and a normal
  // deviation of each matrix's logarithm: a density ratio of 2.5 between the ends at 90 %, in
  // the middle of the 1.5 to 4 that are expected (a guess, not a measurement).
  double depth_ratio = 1.3;
  double matrix_spread = 0.05;
  // Factor on the deviation of attention's and MLP's output matrices. 1 / sqrt(2 L) is what some
  // initialisations give them: then they are gone almost wholly at 52 %.
  double output_scale = 1;
  double most_sparsity = 0.98;  // of a matrix, so that none is emptied
  double index_bytes = 4;       // beside each weight of a sparse matrix (CSR, 32 bit)
};

// Share of the weights gone at `step`: 0 before start, s_f + (s_i - s_f)(1 - share)^3 at the last
// pruning step before. Requires valid parameters.
[[nodiscard]] double sparsity_at(const PruningParameters& parameters, std::int64_t step);

struct WeightGroup {
  double weights = 0;    // how many
  double deviation = 1;  // of their normal distribution
};

// Density of each group where one threshold on |w| leaves 1 - `sparsity` of all weights, no group
// below `least_density`. Exact to rounding, by bisection. Requires deviations above 0,
// 1 - sparsity >= least_density.
[[nodiscard]] std::vector<double> global_densities(std::span<const WeightGroup> groups,
                                                   double sparsity, double least_density);

// Prunes QKV, attention output and the MLP's (experts') matrices of every block; not embedding,
// head, norms, biases or routers. A sparse matrix holds weights and indices, gradients and
// optimizer state of what is left. kBadInput naming the field.
[[nodiscard]] Expected<std::unique_ptr<LoadModel>> make_pruning(const PruningParameters& parameters,
                                                                const LoadInputs& inputs);

}  // namespace dynmo::dynamism
