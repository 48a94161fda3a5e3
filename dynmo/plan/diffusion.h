// SPDX-License-Identifier: Apache-2.0
#pragma once

// DynMo's decentralised balancer (arXiv 2505.14864, kept contiguous): in rounds, every stage looks
// at its neighbour only, and the heavier one gives its boundary layer away where that helps.

#include <cstdint>
#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/plan/balance.h"

namespace dynmo::plan {

struct Diffusion {
  std::vector<int> counts;  // layers a stage
  int rounds = 0;           // until one in which nothing moved, that one included
};

// A round pairs each stage with its right neighbour, the even stages first, then the odd ones, so
// that all pairs of a half round act at once. A pair moves the layer at its boundary if the larger
// of its two loads falls (their sum stays, so an equal maximum would be an equal variance too). So
// the largest load never rises, the sum of squared loads falls with every move, order is kept, no
// stage is emptied, and it ends; but not always at the optimum, as no pair sees further than its
// own two stages.
//
// Starts from the cut of `problem.current` where it has the same placement and layers, from the
// uniform cut otherwise. Requires kDiffusionParameters or kDiffusionTime. kBadInput as `balance`.
[[nodiscard]] Expected<Diffusion> diffuse(Balancer balancer, const BalanceProblem& problem);

// The paper's bound on the rounds, without its constant: min{N^2 ln(S N / g) ln N,
// S N ln(N) / g} for N = `ranks`, S = `layers` and convergence factor g. Requires ranks, layers >=
// 1 and g > 0.
[[nodiscard]] double diffusion_bound(int ranks, int layers, double convergence = 1);

namespace internal {
// The rounds themselves, on prefix sums of loads and counts of at least 1 that cover them.
[[nodiscard]] Diffusion diffuse(const std::vector<std::int64_t>& prefix, std::vector<int> counts);
}  // namespace internal

}  // namespace dynmo::plan
