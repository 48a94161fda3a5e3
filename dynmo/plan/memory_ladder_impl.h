// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memories to plan for that do not depend on how much memory there is: a plan made for one of them
// is a candidate wherever its ranks have as much or more. So more memory adds candidates and takes
// none away, and the best of them is not slower.

#include <vector>

#include "dynmo/core/units.h"
#include "dynmo/cost/cluster.h"

namespace dynmo::plan::internal {

// The largest rung of at most `memory`, or the one `below` rungs under it: 8 an octave, which are
// whole multiples of a power of two. Unlimited memory is a rung of its own, with none under it.
[[nodiscard]] Bytes rung(Bytes memory, int below = 0);

// The cluster with the memory of every rank lowered to its rung, and so many more.
[[nodiscard]] cost::Cluster at_rung(cost::Cluster cluster, int below);

}  // namespace dynmo::plan::internal
