// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rules by which the tokens and the experts of a mixture choose each other. A config names them
// (options.h) and a layer follows them (model/moe_router.h).

namespace dynmo::dynamism {

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

}  // namespace dynmo::dynamism
