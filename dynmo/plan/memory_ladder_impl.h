// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memories to plan for that do not depend on the available memory. A plan made for one of them is a
// candidate if its ranks have the same memory or more. So more memory adds candidates and removes
// none, and the best of them is not slower.

#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"

namespace dynmo::plan::internal {

// Returns the largest rung of at most `memory`, or the one `below` rungs under it. There are 8 an
// octave, which are whole multiples of a power of two. Unlimited memory is a rung of its own, with
// none under it.
[[nodiscard]] Bytes rung(Bytes memory, int below = 0);

// Returns the cluster with the memory of every rank lowered to its rung, and `below` rungs more.
[[nodiscard]] cost::Cluster at_rung(cost::Cluster cluster, int below);

}  // namespace dynmo::plan::internal
