// SPDX-License-Identifier: Apache-2.0
#pragma once

// The balancers share this file: checked input, and the amounts they cut.

#include <vector>

#include "dynmo/core/expected.h"
#include "dynmo/plan/balance.h"
#include "dynmo/plan/chain_impl.h"

namespace dynmo::plan::internal {

// kBadInput as `balance` says.
[[nodiscard]] Expected<void> validate(Balancer balancer, const BalanceProblem& problem);

// `stages` >= 1 counts, the first ones one more.
[[nodiscard]] std::vector<int> uniform_counts(int layers, int stages);

[[nodiscard]] std::vector<double> parameter_weights(const cost::ModelCost& model);

// Work, state and stash of the layers as prefix sums; stage i as a rank of the speed and memory of
// rank placement[i], holding in_flight[i] stashes.
[[nodiscard]] Chain chain_of(const BalanceProblem& problem, const std::vector<Rank>& placement,
                             const std::vector<int>& in_flight);

// The chain of one stage a rank, whose ranks recompute as the problem says.
[[nodiscard]] Expected<Chain> chain_of_ranks(const BalanceProblem& problem);

}  // namespace dynmo::plan::internal
