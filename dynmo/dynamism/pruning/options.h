// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gradual magnitude pruning: its keys, one table for a training and for a scenario.

#include <cstdint>
#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/cost/product_fit.h"
#include "dynmo/dynamism/source_entry.h"
#include "dynmo/dynamism/source_key.h"

namespace dynmo::dynamism {

// Weights of different matrices are compared by this magnitude.
enum class Magnitude {
  kScaled,  // |w| / the std of the matrix's initial values
  // |w|: matrices that start small, such as the two projections into the residual stream, are
  // emptied first (at 52 % of all, they have lost 91 % in a model of 8 blocks).
  kRaw,
};

// About the sparsity at which sparse products take as long as dense ones (bench/sparse_bench).
inline constexpr double kSparseAbove = 0.65;

struct PruningOptions {
  // DynMo's example: from step 3000 to 7000 every 1000, to 90 %; the end point is included.
  std::int64_t start = 3000;
  std::int64_t end = 7000;  // a whole number of `every` behind start
  std::int64_t every = 1000;
  double initial_sparsity = 0;
  double final_sparsity = 0.9;
  // The products with a sparse matrix / those with a dense one, as a training measures them; a
  // matrix stays dense where they take longer.
  cost::ProductFit product_fit = {};
  // Std of the last block's weights / the first's, geometric in between, and normal noise on
  // each matrix's logarithm: a density ratio of 2.5 between the ends at 90 %. Chosen, not measured:
  // the middle of 1.5 to 4.
  double depth_ratio = 1.3;
  double matrix_spread = 0.05;
  // Factor on the std of attention's and MLP's output matrices. 1 / sqrt(2 L) is what some
  // initialisations give them: then they are gone almost wholly at 52 %.
  double output_scale = 1;
  double max_sparsity = 0.98;  // of a matrix, so that none is emptied
  Magnitude magnitude = Magnitude::kScaled;
  // A matrix that has lost more is compressed: sparse products and 28 bytes a kept weight in place
  // of dense ones and 16 a weight. A number, so that the bits of a run depend on no clock. None:
  // "auto", which a run measures before its first step (Source::measure).
  std::optional<double> sparse_above = kSparseAbove;
  double index_bytes = 4;  // of each weight of a sparse matrix (CSR, 32 bit)
};

[[nodiscard]] std::vector<SourceKey> keys_of(PruningOptions& options);
// kBadInput naming the key: a value outside its range or below another that it must not be below,
// an end between two pruning steps.
[[nodiscard]] Expected<void> check(const PruningOptions& options);
// Checks the further rules of a training; errors name keys.
[[nodiscard]] Expected<void> check_training(const PruningOptions& options,
                                            const TrainingSetting& setting);
// The first step that prunes is behind the end of the run.
[[nodiscard]] std::optional<Idle> idle_in(const PruningOptions& options,
                                          const TrainingSetting& setting);

}  // namespace dynmo::dynamism
