// SPDX-License-Identifier: Apache-2.0
#pragma once

// The cut for V placement, where rank r of P holds stages r and 2P-1-r: so that the slowest *rank*
// is as fast as possible. Balancing single stages instead can be worse than an even split.

#include <cstdint>
#include <optional>
#include <vector>

#include "dynmo/plan/chain_impl.h"

namespace dynmo::plan::internal {

// Layers of each of the 2P stages, all at least 1, for the P ranks of `chain`; nullopt if no cut
// fits the memory. Exact: bisects on the bottleneck; whether one can be kept is answered from the
// ends of the model to its middle. After ranks 0..r the layers taken are a prefix [0, a) and a
// suffix [b, L), and for every a the *set* of reachable b is kept as bits: the smallest b alone
// would be wrong, as a stage must not be empty. It does bound the bottleneck from below, and that
// bound is nearly always the answer, so few exact probes are made. Among the cuts with the least
// bottleneck the ranks are chosen from the middle outwards, each as near to its fair share as can
// be, then with the smallest a, then b.
//
// About O(P L R log L) a probe, R the layers a stage can have, and P L^2 bits of memory. Requires
// 2 P <= L.
[[nodiscard]] std::optional<std::vector<int>> best_v_pair(const Chain& chain);

// Whether some cut fits the memory, whatever its time.
[[nodiscard]] bool v_pair_fits(const Chain& chain);

// Bytes of the bit sets of `best_v_pair`.
[[nodiscard]] std::int64_t v_pair_bytes(int layers, int ranks);

}  // namespace dynmo::plan::internal
