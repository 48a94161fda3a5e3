// SPDX-License-Identifier: Apache-2.0
#pragma once

// DynMo's decentralised balancer (arXiv 2505.14864, kept contiguous). In each round a stage sees
// only its neighbour. The heavier one gives away its boundary layer if that helps.

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/plan/balance.h"

namespace dynmo::plan {

struct Diffusion {
  std::vector<int> counts;  // layers a stage
  int rounds = 0;           // up to the first one without a move, inclusive
};

// Balances by rounds. A round pairs each stage with its right neighbour, the even stages first,
// then the odd ones. So all pairs of a half round act at once. A pair moves the layer at its
// boundary if the larger of its two loads falls. (Their sum stays, so an equal maximum would be an
// equal variance too.)
//
// So the largest load never rises, and the sum of squared loads falls with every move. Order is
// kept, no stage is emptied, and it terminates. The result is not always optimal, because a pair
// sees only its two stages.
//
// Starts from the cut of `problem.current` if it has the same placement and layers, else from the
// uniform cut. Requires kDiffusionParameters or kDiffusionTime. Returns kBadInput as balance().
[[nodiscard]] Expected<Diffusion> diffuse(Balancer balancer, const BalanceProblem& problem);

// Returns the paper's bound on the rounds, without its constant:
//
//   min{N^2 ln(S N / g) ln N, S N ln(N) / g}
//
// N is `ranks`, S is `layers`, and g is the convergence factor. Requires ranks, layers >= 1 and g >
// 0.
[[nodiscard]] double diffusion_bound(int ranks, int layers, double convergence = 1);

namespace internal {
// Runs the rounds on prefix sums of loads, with counts of at least 1 that cover them.
[[nodiscard]] Diffusion diffuse(const std::vector<std::int64_t>& prefix, std::vector<int> counts);
}  // namespace internal

}  // namespace dynmo::plan
