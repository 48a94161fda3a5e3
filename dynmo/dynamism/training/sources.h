// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sources of dynamism in real training, one for each folder of dynmo/dynamism. All functions
// require valid options.

#include <cstdint>
#include <memory>

#include "dynmo/dynamism/early_exit/options.h"
#include "dynmo/dynamism/freezing/options.h"
#include "dynmo/dynamism/mixture_of_depths/options.h"
#include "dynmo/dynamism/moe/options.h"
#include "dynmo/dynamism/pruning/options.h"
#include "dynmo/dynamism/sparse_attention/options.h"
#include "dynmo/dynamism/training/source.h"

namespace dynmo::dynamism {

// Makes a mixture of experts. Every block's MLP becomes experts (model/moe.h), all of them on the
// rank of their layer. Their tokens are counted. If the experts of a layer were on several devices,
// unequal counts would slow it down. Straggler factors measure by how much.
[[nodiscard]] std::unique_ptr<Source> make_moe_source(const MoeOptions& options);
// Prunes gradually. At every event the smallest weights of all matrices of training blocks are
// removed. One threshold over all ranks selects them (select.h). They never return. Once a matrix
// is sparse enough to be compressed, its products, gradients and moments shrink (model/pruned.h).
[[nodiscard]] std::unique_ptr<Source> make_pruning_source(const PruningOptions& options);
// Freezes the layers of a prefix in a run of `steps` steps, by FreezingSchedule or ConvergenceRule.
// Requires a rule that a training supports.
[[nodiscard]] std::unique_ptr<Source> make_freezing_source(const FreezingOptions& options,
                                                           std::int64_t steps);
// Makes dynamic sparse attention. The attention of every block computes only the pairs of tokens
// that a pattern chooses in each forward pass (pattern.h). Their number differs by layer and step.
// The controller measures it.
[[nodiscard]] std::unique_ptr<Source> make_sparse_attention_source(
    const SparseAttentionOptions& options);
// Makes early exit. Some blocks are followed by a separate head, where tokens whose prediction is
// sure leave (exit_layer.h). The threshold of confidence is fixed, or follows the counts of the
// last step. Then a scheduled share of the tokens stays. Every rank has the same counts. No token
// of a step affects which others leave in it.
[[nodiscard]] std::unique_ptr<Source> make_early_exit_source(const EarlyExitOptions& options);
// Makes a mixture of depths. Every other block is one layer that works on the tokens that its
// router chooses (routed_block.h). Shapes and work never change: cheap and expensive blocks
// alternate.
[[nodiscard]] std::unique_ptr<Source> make_mixture_of_depths_source(
    const MixtureOfDepthsOptions& options);

}  // namespace dynmo::dynamism
