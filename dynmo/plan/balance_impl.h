// SPDX-License-Identifier: Apache-2.0
#pragma once

// Common parts of the balancers: checked input, and the amounts that they balance.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/chain_impl.h"

namespace dynmo::plan::internal {

// Checks the input. Returns kBadInput as balance() does.
[[nodiscard]] Expected<void> validate(Balancer balancer, const BalanceProblem& problem);

// Returns `stages` >= 1 counts of sum `layers` that differ by at most one, the larger ones first.
[[nodiscard]] std::vector<int> uniform_counts(int layers, int stages);

[[nodiscard]] std::vector<double> parameter_weights(const cost::ModelCost& model);

// Returns work, state and stash of the layers as prefix sums. Stage i is a rank with the speed and
// memory of rank placement[i], and holds in_flight[i] stashes.
[[nodiscard]] Chain chain_of(const BalanceProblem& problem, const std::vector<Rank>& placement,
                             const std::vector<int>& in_flight);

// Returns the chain for one stage a rank, with recomputation as the problem says. Returns the
// errors of in_flight().
[[nodiscard]] Expected<Chain> chain_of_ranks(const BalanceProblem& problem);

}  // namespace dynmo::plan::internal
