// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys of gradual magnitude pruning, one table for a training and for a scenario.

#include <cstdint>
#include <optional>

#include "dynmo/core/expected.h"
#include "dynmo/cost/product_fit.h"
#include "dynmo/dynamism/source_entry.h"
#include "dynmo/dynamism/source_key.h"

namespace dynmo::dynamism {

// The magnitude by which weights of different matrices are compared.
enum class Magnitude {
  kScaled,  // |w| / the std of the matrix's initial values
  // |w|. Matrices that start small, such as the two projections into the residual stream, are
  // emptied first. (At 52 % of all, they have lost 91 % in a model of 8 blocks.)
  kRaw,
};

enum class PruningForm {
  kWeights,  // single weights of matrices
  // Whole hidden units of MLPs and whole groups of heads, so that matrices shrink and stay dense.
  // This pays on a GPU, and in bf16.
  kUnits,
};

// Approximate sparsity at which sparse products take as long as dense ones (bench/sparse_bench).
inline constexpr double kSparseAbove = 0.65;

struct PruningOptions {
  // DynMo's example: from step 3000 to 7000 every 1000, to 90 %. The end point is included.
  std::int64_t start = 3000;
  std::int64_t end = 7000;  // a whole number of `every` behind start
  std::int64_t every = 1000;
  double initial_sparsity = 0;
  double final_sparsity = 0.9;
  PruningForm form = PruningForm::kWeights;
  // The hidden units left of an MLP are rounded up to a multiple of it. Products of bf16 need
  // multiples of 8 for their fast kernels. A GPU's tiles have 128.
  std::int64_t unit_multiple = 8;
  // Time of the products with a sparse matrix / with a dense one, as a training measures it. A
  // matrix stays dense if sparse products take longer.
  cost::ProductFit product_fit = {};
  // Std of the last block's weights / the first's, geometric in between. Each matrix's log std also
  // has normal noise. The density ratio between the ends is 2.5 at 90 %. Chosen, not measured: the
  // middle of 1.5 to 4.
  double depth_ratio = 1.3;
  double matrix_spread = 0.05;
  // Factor on the std of attention's and MLP's output matrices. Some initialisations use 1 / sqrt(2
  // L). Then they are almost empty at 52 %.
  double output_scale = 1;
  // Std of the sizes of a layer's units / their mean. Chosen, not measured: units of a trained MLP
  // differ more than drawn ones, whose sizes are almost equal.
  double unit_spread = 0.1;
  double max_sparsity = 0.98;  // of a matrix, so that none is emptied
  Magnitude magnitude = Magnitude::kScaled;
  // A matrix is compressed above this sparsity. It then has sparse products and 28 bytes a kept
  // weight, instead of dense products and 16 a weight. It is a number, so that the bits of a run
  // depend on no clock. None is "auto", which a run measures before its first step
  // (Source::measure).
  std::optional<double> sparse_above = kSparseAbove;
  double index_bytes = 4;  // of each weight of a sparse matrix (CSR, 32 bit)
};

[[nodiscard]] std::vector<SourceKey> keys_of(PruningOptions& options);
// Checks the values. Returns kBadInput for a key outside its range, a key that contradicts another
// one, or an end between two pruning steps.
[[nodiscard]] Expected<void> check(const PruningOptions& options);
// Returns kBadInput if the last pruning step is behind the end of the run.
[[nodiscard]] Expected<void> check_training(const PruningOptions& options,
                                            const TrainingSetting& setting);
// Returns a reason if the first step that prunes is behind the end of the run.
[[nodiscard]] std::optional<Idle> idle_in(const PruningOptions& options,
                                          const TrainingSetting& setting);

}  // namespace dynmo::dynamism
