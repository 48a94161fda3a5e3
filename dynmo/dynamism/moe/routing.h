// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rules by which tokens and experts of a mixture choose each other. A config names them
// (options.h) and a layer follows them (model/moe_router.h).

namespace dynmo::dynamism {

// The rule for choosing experts. z are the scores, p = softmax(z). Except in kExpertChoice, a token
// has the `top_k` experts that rank highest by the value below.
enum class MoeRouter {
  kTopK,  // z (Shazeer et al., 2017), with an auxiliary loss (Fedus et al., 2021)
  // p + a bias that evens out the counts (Wang et al., "Auxiliary-loss-free load balancing", 2024).
  kBias,
  // p after 8 rounds of Sinkhorn's balancing of rows and columns, in training alone.
  kSinkhorn,
  // The sum of all z, with the same number of tokens for each expert (kernels/select_top.h). In
  // training alone.
  kBalanced,
  // Experts take the tokens of highest p (Zhou et al., 2022), so they depend on later tokens.
  kExpertChoice,
};
// The assignments that an expert above its capacity drops: those of the last tokens, or those with
// the smallest gates.
enum class MoeDrop { kPosition, kProbability };

}  // namespace dynmo::dynamism
