// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cut for V placement, where rank r of P has stages r and 2P-1-r. It makes the slowest *rank*
// as fast as possible. Balancing single stages instead can be worse than an even split.

#include <cstdint>
#include <optional>
#include <vector>

#include "dynmo/plan/chain_impl.h"

namespace dynmo::plan::internal {

// Returns the layers of each of the 2P stages, all at least 1, for the P ranks of `chain`. Returns
// nullopt if no cut fits the memory. Exact: bisects on the bottleneck. Each bottleneck is tested
// from the ends of the model to its middle. After ranks 0..r the assigned layers are a prefix [0,
// a) and a suffix [b, L). For every a the *set* of reachable b is stored as bits. The smallest b
// alone would be wrong, as a stage must not be empty. It gives a lower bound of the bottleneck,
// which is nearly always the answer, so few exact tests are made.
//
// Among the cuts with the least bottleneck the ranks are chosen from the middle outwards. Each is
// as near to its fair share as possible, then with the smallest a, then b.
//
// Takes about O(P L R log L) a test, and P L^2 bits of memory. R is the number of possible layer
// counts of a stage. Requires 2 P <= L.
[[nodiscard]] std::optional<std::vector<int>> best_v_pair(const Chain& chain);

// Returns whether some cut fits the memory, however long its step is.
[[nodiscard]] bool v_pair_fits(const Chain& chain);

// Returns the bytes of the bit sets of best_v_pair().
[[nodiscard]] std::int64_t v_pair_bytes(int layers, int ranks);

}  // namespace dynmo::plan::internal
